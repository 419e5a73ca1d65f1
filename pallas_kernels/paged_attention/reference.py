"""Paged attention in plain jnp: what every kernel is held to, and the path that serves on a CPU.

A call must read (kv_len rounded up to a block) x 2 K H elements a row. Two loops with trip counts
known only at run time make the cost follow the real lengths instead of the page table's width:

- rows with one query: a flat list of (row, block) items, `items` of them an iteration, so that
  neither a long row among short ones nor padding rows cost more than their own blocks;
- rows with chunks: a list of (row, tile of queries), one a time, over the blocks it may see.

Both keep a running maximum and sum (online softmax, arXiv:1805.02867) in float32.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.meta import AttentionMeta, Kind

MASKED = -1e30  # finite, so that a block in which a query sees nothing makes no NaN
DECODE_ITEMS = 16  # (row, block) pairs of an iteration, fewer where there are few rows
DECODE_BLOCK = 64
ONE_ROW_BLOCK = 128
TILE_QUERIES = 32
TILE_BLOCK = 128


def write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    slot_mapping: Int[Array, "T"],
) -> Float[Array, "pages page_size 2*K H"]:
    """Writes each token's k and v at its slot; in place where the caller donates `kv_pages`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    page_size = kv_pages.shape[1]
    new = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return kv_pages.at[page, offset].set(new.astype(kv_pages.dtype), mode="promise_in_bounds")


def attend(
    q: Float[Array, "T N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    sm_scale: float,
    kind: Kind,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    rows_kernel: Callable[..., Array] | None = None,
    rows_in_place: Callable[..., Array] | None = None,
    chunks_kernel: Callable[..., Array] | None = None,
) -> Float[Array, "T N H"]:
    """Softmax attention of each query over the cached tokens of its row, up to its own position.

    rows_kernel, chunks_kernel: kernels that take the place of this module's `attend_rows` and
    `attend_chunks`. rows_in_place: does what `rows_kernel` does and zeros the step's padding, in an
    output for all tokens, of which the chunks' are left for `chunks_kernel` to write.
    """
    rows_kernel = rows_kernel or attend_rows
    chunks_kernel = chunks_kernel or attend_chunks
    options = {"sm_scale": sm_scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    if kind == "decode" and len(q) > len(meta.kv_lens) and rows_kernel is attend_rows:
        queries_per_row = len(q) // len(meta.kv_lens)
        every = jnp.arange(len(meta.kv_lens) + 1, dtype=jnp.int32) * queries_per_row
        meta = dataclasses.replace(meta, query_start=every, num_decode_rows=jnp.int32(0))
        return attend_chunks(q, jnp.zeros_like(q), kv_pages, meta, sinks=sinks, **options)
    if kind == "decode":
        return rows_kernel(q, kv_pages, meta.page_table, meta.kv_lens, sinks=sinks, **options)
    num_rows = min(len(meta.kv_lens), len(q))  # a decode row has a token of its own
    rows = jnp.arange(num_rows)
    lens = jnp.where(rows < meta.num_decode_rows, meta.kv_lens[:num_rows], 0)
    rows = q[:num_rows], kv_pages, meta.page_table[:num_rows], lens
    if rows_in_place is not None:
        out = rows_in_place(*rows, len(q), meta.query_start[-1], sinks=sinks, **options)
    else:
        out = jnp.zeros_like(q).at[:num_rows].set(rows_kernel(*rows, sinks=sinks, **options))
    return chunks_kernel(q, out, kv_pages, meta, sinks=sinks, **options)


def attend_rows(
    q: Float[Array, "S N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    page_table: Int[Array, "S P"],
    kv_lens: Int[Array, "S"],
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "S N H"]:
    """One query a row, each its sequence's newest token. Zeros for rows of length 0."""
    num_rows, num_heads, head_dim = q.shape
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks}
    if num_rows == 1:
        return _attend_tile(
            q,
            kv_pages,
            page_table,
            jnp.int32(0),
            kv_lens[0],
            kv_lens - 1,
            block=_block(ONE_ROW_BLOCK, kv_pages),
            sm_scale=sm_scale,
            **options,
        ).astype(q.dtype)
    items = min(DECODE_ITEMS, 2 * num_rows)
    block = _block(DECODE_BLOCK, kv_pages)
    queries = _group_heads(q, kv_pages) * sm_scale

    # The list of work: row s owns items [ends[s] - blocks[s], ends[s]), in row order.
    first_token = _window_start(kv_lens - 1, sliding_window)
    first_block = first_token // block
    blocks = _ceil_div(kv_lens, block) - first_block
    ends = jnp.cumsum(blocks)
    # Rows without work are left out of the running state, so that `items` neighbouring items
    # touch at most `items` neighbouring rows of it.
    place = jnp.cumsum(blocks > 0) - 1
    # What the loop looks up of a row, in one array, for one small gather instead of four.
    table = jnp.stack([first_block - (ends - blocks), kv_lens, first_token, place], axis=1)

    def step(i, state):
        item = i * items + jnp.arange(items)
        row = jnp.sum(item[:, None] >= ends, axis=1)
        live = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        shift, length, oldest, lane = table[row].T
        length = jnp.where(live, length, 0)
        k, v, position = _read_block(kv_pages, page_table, row, item + shift, length, block)
        seen = (position < length[:, None]) & (position >= oldest[:, None])
        scores = jnp.einsum("iKGH,iKtH->iKGt", queries[row], k, precision=_precision(kv_pages))
        scores = jnp.where(seen[:, None, None], _cap(scores, soft_cap), MASKED)
        top = scores.max(-1)
        weights = jnp.exp(scores - top[..., None])
        out = jnp.einsum("iKGt,iKtH->iKGH", weights, v, precision=_precision(kv_pages))
        start = lane[0]
        lane = jnp.where(live, lane - start, items)
        return _merge(state, start, lane, top, weights.sum(-1), out)

    state = _empty_state((num_rows + items - 1, *queries.shape[1:]))
    top, total, out = lax.fori_loop(0, _ceil_div(ends[-1], items), step, state)
    out = _finish(top, total, out, sinks)[jnp.maximum(place, 0)]
    out = jnp.where((kv_lens > 0)[:, None, None, None], out, 0)
    return out.reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def _merge(state, start, lane, top, total, out):
    """Folds items into the running (maximum, sum, output) of rows start, start + 1, ...

    Item i belongs to row start + lane[i]; lane[i] == len(lane) says to none.
    """
    items = len(lane)
    old_top, old_total, old_out = (lax.dynamic_slice_in_dim(part, start, items) for part in state)
    mine = (lane == jnp.arange(items)[:, None])[..., None, None]  # [row, item, 1, 1]
    new_top = jnp.maximum(old_top, jnp.where(mine, top, MASKED).max(1))
    keep = jnp.exp(old_top - new_top)
    scale = jnp.where(mine, jnp.exp(top - new_top[:, None]), 0)
    new_total = old_total * keep + (scale * total).sum(1)
    new_out = old_out * keep[..., None] + jnp.einsum("riKG,iKGH->rKGH", scale, out)
    return tuple(
        lax.dynamic_update_slice_in_dim(part, new, start, 0)
        for part, new in zip(state, (new_top, new_total, new_out), strict=True)
    )


def attend_chunks(
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "T N H"]:
    """Rows from `num_decode_rows` on, written over `out`, whose other tokens stay as they are."""
    num_tokens = len(q)
    num_rows = len(meta.kv_lens)
    tile = min(TILE_QUERIES, num_tokens)

    query_lens = meta.query_start[1:] - meta.query_start[:-1]
    is_chunk = (jnp.arange(num_rows) >= meta.num_decode_rows) & (meta.kv_lens > 0)
    tiles = jnp.where(is_chunk, _ceil_div(query_lens, tile), 0)
    ends = jnp.cumsum(tiles)
    # A row's last tile may reach past the row: its surplus is overwritten by the next row's tiles,
    # which come later, or falls on padding tokens, where it is zero.
    padded_q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    padded_out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))

    def step(t, padded_out):
        row = jnp.sum(t >= ends)
        first = (t - (ends - tiles)[row]) * tile
        token = meta.query_start[row] + first
        length = meta.kv_lens[row]
        tile_out = _attend_tile(
            lax.dynamic_slice_in_dim(padded_q, token, tile),
            kv_pages,
            meta.page_table,
            row,
            length,
            length - query_lens[row] + first + jnp.arange(tile),
            block=_block(TILE_BLOCK, kv_pages),
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        real = jnp.arange(tile) < query_lens[row] - first
        tile_out = jnp.where(real[:, None, None], tile_out, 0).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(padded_out, tile_out, token, 0)

    return lax.fori_loop(0, ends[-1], step, padded_out)[:num_tokens]


def _attend_tile(
    q: Float[Array, "Q N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    page_table: Int[Array, "S P"],
    row: Int[Array, ""],
    length: Int[Array, ""],
    query_position: Int[Array, "Q"],
    *,
    block: int,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "Q N H"]:
    """Neighbouring queries of one row, over the blocks that any of them sees."""
    queries = jnp.moveaxis(_group_heads(q, kv_pages) * sm_scale, 0, 1)  # [K, Q, G, H]
    shape = queries.shape
    queries = queries.reshape(shape[0], -1, shape[-1])
    oldest = _window_start(query_position, sliding_window)
    last = jnp.minimum(query_position[-1], length - 1)

    def step(index, state):
        top, total, out = state
        k, v, position = _read_block(
            kv_pages, page_table, row[None], index[None], length[None], block
        )
        seen = (position <= query_position[:, None]) & (position >= oldest[:, None])
        scores = jnp.einsum("KqH,KtH->Kqt", queries, k[0], precision=_precision(kv_pages))
        scores = _cap(scores, soft_cap).reshape(*shape[:-1], block)
        scores = jnp.where(seen[:, None], scores, MASKED).reshape(shape[0], -1, block)
        new_top = jnp.maximum(top, scores.max(-1))
        keep = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        add = jnp.einsum("Kqt,KtH->KqH", weights, v[0], precision=_precision(kv_pages))
        return new_top, total * keep + weights.sum(-1), out * keep[..., None] + add

    state = lax.fori_loop(oldest[0] // block, last // block + 1, step, _empty_state(queries.shape))
    top, total, out = (
        jnp.moveaxis(part.reshape(*shape[:3], *part.shape[2:]), 1, 0) for part in state
    )
    return _finish(top, total, out, sinks).reshape(q.shape)


def _empty_state(shape):
    """Running (maximum, sum of weights, output) of queries that have seen nothing yet."""
    return (
        jnp.full(shape[:-1], MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _read_block(kv_pages, page_table, row, index, length, block):
    """Keys and values [I, K, block, H] in float32 of block `index[i]` of row `row[i]`; positions.

    Values at and beyond the length are zeros: unused cache may hold NaN, and 0 * NaN is NaN.
    """
    _, page_size, _, head_dim = kv_pages.shape
    pages_per_block = block // page_size
    entry = index[:, None] * pages_per_block + jnp.arange(pages_per_block)
    pages = page_table[row[:, None], jnp.minimum(entry, page_table.shape[1] - 1)]
    pages = jnp.where(entry * page_size < length[:, None], pages, 0)
    position = index[:, None] * block + jnp.arange(block)

    # Split by head only once gathered: another view of the whole cache would be a copy on a TPU.
    read = kv_pages.at[pages].get(mode="promise_in_bounds")
    read = read.reshape(*read.shape[:3], -1, 2, head_dim)  # [I, pages, page_size, K, 2, H]
    read = jnp.transpose(read, (4, 0, 3, 1, 2, 5))
    read = read.reshape(2, len(row), -1, block, head_dim).astype(jnp.float32)
    values = jnp.where((position < length[:, None])[:, None, :, None], read[1], 0)
    return read[0], values, position


def _block(tokens, kv_pages):
    """About this many tokens, in whole pages."""
    page_size = kv_pages.shape[1]
    return page_size * max(1, tokens // page_size)


def _group_heads(q, kv_pages):
    """[..., N, H] in any dtype -> [..., K, G, H] in float32."""
    return q.reshape(*q.shape[:-2], kv_pages.shape[2] // 2, -1, q.shape[-1]).astype(jnp.float32)


def _finish(top, total, out, sinks):
    """Running state to output; a sink is one more key of its head, with this logit and no value."""
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(top.shape[-2:])
        new_top = jnp.maximum(top, sinks)
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.exp(sinks - new_top)
        out = out * keep[..., None]
    return out / jnp.where(total > 0, total, 1)[..., None]


def _cap(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _window_start(position, sliding_window):
    """The oldest position that a query at `position` sees: the window counts the query itself."""
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - sliding_window + 1, 0)


def _ceil_div(a, b):
    return (a + b - 1) // b


def _precision(kv_pages):
    # 16-bit values are exact in the TF32 that a GPU multiplies in by default; float32's are not.
    return lax.Precision.HIGHEST if kv_pages.dtype == jnp.float32 else lax.Precision.DEFAULT
