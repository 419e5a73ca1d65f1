"""Paged attention on a Hopper GPU, in Pallas Mosaic GPU: rows with one or a few new tokens.

A call must read kv_len x 2 K H elements a row and little else. On an H200 (JAX 0.11.2,
2026-12-01, 32 heads over 8, width 128, page 16) it does so at 4.2 TB/s with 64 rows of 4k or 256 of
1k, 3.7 with 256 of 264 and 3.3 with one row of 32k; 4.3 is the card's rate of copying.

`gpu_plan` shares the blocks of all (row, kv head) tasks out to workers, which stay on their
multiprocessor. A worker is two warpgroups: one issues the copies of pages into a ring in shared
memory, the other multiplies. A thread block has two such pairs where shared memory holds them, so
that one's copies fill the time in which the other's work depends on what it waits for.

Tokens are the 64 rows of a wgmma, and a kv head's queries its columns, 8 at least: new tokens in
order, the heads of the group together; what the other columns hold is never written:

    column   0 .. G-1     G .. 2G-1   ..   (Q-1)G .. QG-1   QG ..
    query    oldest                        newest           none

So are the columns of the output, whose rows are the head's width. Queries as the 64 rows, most of
them none, are eight times the work, which the card's power limit turns into time: 3 % of a step of
256 rows (H200). More than MAX_COLUMNS are in tiles that attend as heads of their own.

Keys and values of a kv head lie side by side. Of a width that is no multiple of 64 both are copied
with 32 columns of the other, since shared memory holds whole tiles: queries are 0 there, and the
rows of the output that come of it are left out. So what is written for a token must be finite: an
infinite value would make its score NaN, and with it the head's whole output.

Of a task in parts, whoever writes the last part merges them (`gpu_merge`).

With `reads_early` a worker's first copies don't wait for the kernel ahead (see `early_launch`): the
plan, the page table and all cache but a row's newest tokens are older than it. The caller sees to
that: no row's cache, but for its newest tokens, is written in this step, and the kernel ahead is
given what `early_inputs` names, and waits before it allows.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from pallas_kernels.early_launch import allow_next, wait_for_inputs
from pallas_kernels.paged_attention import gpu_merge, reference
from pallas_kernels.paged_attention.gpu_merge import TILED, padded_width
from pallas_kernels.paged_attention.gpu_plan import BLOCK, Column, first_block, make_plan
from pallas_kernels.paged_attention.meta import AttentionSpec

plgpu: Any = mosaic_gpu  # whose annotations call its transforms abstract and its ACC private

SHARED_BYTES = 227 << 10  # that a thread block may have on Hopper
MAX_COLUMNS = 32  # of queries that are multiplied together, for registers' sake
REDUCE_WORDS = 32  # of shared memory a query, for a warpgroup's reductions over its warps
LOG2_E = math.log2(math.e)
# Of a thread, by pairs of warpgroups in a thread block: multiplying, copying. A launch gives 256
# threads 255 each and 512 threads 128; asking for more in all would wait for ever.
REGISTERS = {1: (256, 96), 2: (208, 48)}


@dataclasses.dataclass(frozen=True)
class Config:
    """workers: pairs of warpgroups, all thread blocks' together. pairs: of a thread block.
    stages: blocks of K and V in flight each, a worker. merge_inside: the last worker to finish a
    task in parts merges them, else a second kernel does.
    """

    workers: int = 132
    pairs: int = 1
    stages: int = 4
    query_buffers: int = 2
    merge_inside: bool = True

    def __post_init__(self):
        for name, low in (("workers", 1), ("stages", 2), ("query_buffers", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {low} or more")
        if self.pairs not in REGISTERS:
            raise ValueError(f"pairs is {self.pairs}; allowed: 1, 2")
        if self.workers % self.pairs:
            raise ValueError(f"workers is {self.workers}, no multiple of {self.pairs} pairs")

    def shared_bytes(self, head_dim: int, queries: int) -> int:
        """Shared memory a thread block takes, near enough, with so many queries a kv head."""
        width, (_, columns) = padded_width(head_dim), query_tiles(queries)
        ring = self.stages * 2 * BLOCK * width * 2
        tile = columns * (((self.query_buffers + 1) * width + BLOCK) * 2 + REDUCE_WORDS * 4)
        return self.pairs * (ring + tile) + 2048


# What `python -m bench.kernels --sweep` found fastest: device kind -> head width, page size.
TUNED: dict[str, dict[tuple[int, int], Config]] = {}
MULTIPROCESSORS = {"NVIDIA H100 PCIe": 114}  # of the others: 132


def default_config(spec: AttentionSpec, device_kind: str = "") -> Config:
    """The tuned settings of this kind of device, or else two pairs if they fit (4 % of a whole step
    at 256 rows of 256, H200), and as many stages as fit, 4 at most."""
    if tuned := TUNED.get(device_kind, {}).get((spec.head_dim, spec.page_size)):
        return tuned
    blocks = MULTIPROCESSORS.get(device_kind, 132)
    queries = spec.group * spec.queries_per_row
    for pairs, stages in itertools.product((2, 1), (4, 3, 2)):
        config = Config(blocks * pairs, pairs, stages)
        if config.shared_bytes(spec.head_dim, queries) <= SHARED_BYTES:
            return config
    config = Config(blocks, 1, 2, query_buffers=1)
    if config.shared_bytes(spec.head_dim, queries) <= SHARED_BYTES:
        return config
    raise NotImplementedError(f"head width {spec.head_dim} does not fit shared memory")


def query_tiles(queries: int) -> tuple[int, int]:
    """In how many tiles a kv head's queries are multiplied, and the columns of each: copies into
    tiled shared memory move 8 at least."""
    tiles = math.ceil(queries / MAX_COLUMNS)
    return tiles, 8 * math.ceil(queries / tiles / 8)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernel can't do a case, or None where it can."""
    if spec.head_dim % 32 or not 32 <= spec.head_dim <= 256:
        return f"head width {spec.head_dim} (multiples of 32 up to 256 work)"
    if spec.group * spec.queries_per_row > BLOCK:
        return f"{spec.group} heads x {spec.queries_per_row} queries a kv head ({BLOCK} at most)"
    if spec.kv_dtype not in ("bfloat16", "float16"):
        return f"a {spec.kv_dtype} cache (bfloat16 and float16 work)"
    if spec.page_size not in (8, 16, 32, 64, 128):
        return f"page size {spec.page_size} (8, 16, 32, 64 and 128 work)"
    return None


def attend_rows(
    q: Float[Array, "T N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    page_table: Int[Array, "S P"],
    kv_lens: Int[Array, "S"],
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
    config: Config,
    reads_early: bool = False,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """T / S queries a row, its sequence's newest tokens. Zeros for rows of length 0, which come
    last."""
    num_kv_heads = kv_pages.shape[2] // 2
    out = _attend(
        q,
        kv_pages,
        page_table,
        kv_lens,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        config=config,
        reads_early=reads_early,
        interpret=interpret,
    )
    num_rows = len(kv_lens)
    queries_per_row, group = len(q) // num_rows, q.shape[1] // num_kv_heads
    out = out.reshape(num_rows, num_kv_heads, -1, q.shape[2])[:, :, : queries_per_row * group]
    out = out.reshape(num_rows, num_kv_heads, queries_per_row, group, q.shape[2])
    return jnp.moveaxis(out, 2, 1).reshape(q.shape).astype(q.dtype)


def early_inputs(
    page_table: Int[Array, "S P"],
    kv_lens: Int[Array, "S"],
    spec: AttentionSpec,
    config: Config,
) -> tuple[Array, ...]:
    """What `attend_rows` with `reads_early` reads before it waits, the cache apart."""
    tiles, _ = query_tiles(spec.group * spec.queries_per_row)
    heads, window = spec.num_kv_heads * tiles, spec.sliding_window
    plan = make_plan(kv_lens, heads, window, config.workers, spec.queries_per_row)
    return page_table, kv_lens, plan


def in_place(spec: AttentionSpec, *, interpreted: bool = False) -> bool:
    """Whether `attend_rows_in_place` can do a case: a kv head's queries lie in the output as they
    do in the kernel."""
    return _stored(spec.group, interpreted) == spec.group


def attend_rows_in_place(
    q: Float[Array, "S N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    page_table: Int[Array, "S P"],
    kv_lens: Int[Array, "S"],
    num_tokens: int,
    padding_from: Int[Array, ""],
    **options: Any,
) -> Float[Array, "num_tokens N H"]:
    """As `attend_rows` with one query a row, in an output of `num_tokens` whose first ones the rows
    are: zeros from `padding_from` on, and undefined for rows of length 0 and what else lies
    before."""
    place = num_tokens, padding_from.reshape(1).astype(jnp.int32)
    out = _attend(q, kv_pages, page_table, kv_lens, **options, place=place)
    return out.reshape(num_tokens, *q.shape[1:]).astype(q.dtype)


def _stored(used: int, interpreted: bool) -> int:
    """Rows of an output that hold the `used` ones of a kv head. A copy may reach past an array's
    end: nothing is read or written there. That serves where one tile of 8 holds a head's queries,
    though not in the interpreter."""
    return used if used <= 8 and not interpreted else math.prod(query_tiles(used))


def _attend(
    q,
    kv_pages,
    page_table,
    kv_lens,
    *,
    sm_scale,
    sliding_window,
    soft_cap,
    sinks,
    config: Config,
    reads_early: bool = False,
    interpret: Any = None,
    place: tuple[int, Int[Array, "1"]] | None = None,
) -> Float[Array, "rows K*tiles stored/tiles H"]:
    """The kernel's output: of each row and kv head the queries in order, `_stored` of them in
    tiles; or, with `place` (tokens in all, those that are not padding), of each token."""
    num_rows, (num_tokens, num_heads, head_dim) = len(kv_lens), q.shape
    queries_per_row = num_tokens // num_rows
    _, page_size, num_parts, _ = kv_pages.shape
    num_kv_heads = num_parts // 2
    group = num_heads // num_kv_heads
    used = queries_per_row * group
    tiles, columns = query_tiles(used)
    heads, dtype = num_kv_heads * tiles, kv_pages.dtype
    plan = make_plan(kv_lens, heads, sliding_window, config.workers, queries_per_row)
    interpreted = interpret is not None
    merge_inside = config.merge_inside and not interpreted  # it can't count
    options = {"interpret": interpret} if interpreted else {}
    stored = _stored(used, interpreted)
    queries = q.reshape(num_rows, queries_per_row, num_kv_heads, group, head_dim).astype(dtype)
    queries = jnp.moveaxis(queries, 1, 2).reshape(num_rows, num_kv_heads, used, head_dim)
    width = padded_width(head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, stored - used), (0, width - head_dim)))
    queries = queries.reshape(num_rows, heads, stored // tiles, width)
    kv_pages = kv_pages.reshape(-1, page_size, num_kv_heads, 2 * head_dim)
    inputs = [queries, kv_pages, page_table, kv_lens, plan]
    out_rows = num_rows
    if place is not None:
        out_rows, padding_from = place
        inputs.append(padding_from)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group) * LOG2_E
        sinks = jnp.tile(sinks, (1, queries_per_row))
        sinks = jnp.pad(sinks, ((0, 0), (0, tiles * columns - used)))
        inputs.append(sinks.reshape(heads, columns))
    body = functools.partial(
        _worker,
        has_place=place is not None,
        has_sinks=sinks is not None,
        tiles=tiles,
        columns=columns,
        group=group,
        queries_per_row=queries_per_row,
        page_size=page_size,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        config=config,
        reads_early=reads_early,
        merge_inside=merge_inside,
        interpret=interpret,
    )
    compiler_params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    )
    slots = 2 * config.workers
    out, *parts = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((out_rows, heads, stored // tiles, width), dtype),
            jax.ShapeDtypeStruct((slots, width, columns), jnp.float32),
            jax.ShapeDtypeStruct((slots, columns), jnp.float32),
        ],
        scratch_types=_scratch(config, width, columns, page_size, dtype),
        grid=(config.workers // config.pairs,),
        grid_names=("block",),
        num_threads=2 * config.pairs,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=compiler_params,
        **options,
    )(*inputs)
    if not merge_inside:
        out_ref = jax.new_ref(out)
        merge: Any = pl.kernel(
            functools.partial(gpu_merge.merge_kernel, out_ref=out_ref),
            mesh=plgpu.Mesh(
                grid=(config.workers, columns // gpu_merge.TILE), grid_names=("worker", "tile")
            ),
            compiler_params=compiler_params,
            name="paged_decode_merge",
            **options,
        )
        merge(*parts, plan)
        out = jax.freeze(out_ref)
    return out[..., width - head_dim :]


def _scratch(config, width, columns, page_size, dtype) -> dict[str, Any]:
    """Shared memory, and barriers that order its use; of each pair of warpgroups in turn."""
    queries, stages = (config.pairs * n for n in (config.query_buffers, config.stages))
    ring = plgpu.SMEM((stages, BLOCK, width), dtype, transforms=TILED)
    full = plgpu.Barrier(num_arrivals=max(1, BLOCK // page_size), num_barriers=stages)
    free = plgpu.Barrier(num_barriers=stages)
    return {
        "queries_smem": plgpu.SMEM((queries * columns, width), dtype, transforms=TILED),
        "k_smem": ring,
        "v_smem": ring,
        "weights_smem": plgpu.SMEM((config.pairs, columns, BLOCK), dtype, transforms=TILED),
        "out_smem": plgpu.SMEM((config.pairs, columns, width), dtype, transforms=TILED),
        "word_smem": plgpu.SMEM((config.pairs, 2), jnp.int32),
        "reduce_smem": plgpu.SMEM((config.pairs, REDUCE_WORDS * columns), jnp.float32),
        "queries_full": plgpu.Barrier(num_barriers=queries),
        "queries_free": plgpu.Barrier(num_barriers=queries),
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
    }


def _worker(
    queries_ref,
    kv_ref,
    page_table_ref,
    lens_ref,
    plan_ref,
    *rest_refs,
    queries_smem,
    k_smem,
    v_smem,
    weights_smem,
    out_smem,
    word_smem,
    reduce_smem,
    queries_full,
    queries_free,
    k_full,
    v_full,
    k_free,
    v_free,
    has_place,
    has_sinks,
    tiles,
    columns,
    group,
    queries_per_row,
    page_size,
    sm_scale,
    sliding_window,
    soft_cap,
    config,
    reads_early,
    merge_inside,
    interpret,
):
    if not reads_early:
        wait_for_inputs(interpret)
    *more_refs, out_ref, part_ref, part_lse_ref = rest_refs
    padding_ref, sinks_ref = more_refs[:has_place], more_refs[has_place:]
    assert len(sinks_ref) == has_sinks
    num_heads = out_ref.shape[1]  # with queries' tiles as heads of their own
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.rem(warpgroup, jnp.int32(config.pairs))
    # Neighbours in the list of work are on different multiprocessors, however short it is.
    worker = lax.axis_index("block") + pair * (config.workers // config.pairs)
    own = (x.at[pair] for x in (weights_smem, out_smem, word_smem, reduce_smem))
    weights_smem, out_smem, word_smem, reduce_smem = own
    over_tokens = functools.partial(_over_tokens, smem=reduce_smem, interpret=interpret)
    num_rows = lens_ref.shape[0]
    width = v_smem.shape[-1]

    def read_plan(column):
        return plan_ref[worker, column]

    def slot_of(i, size):
        """Of this pair's `size`, the one whose turn it is at `i`."""
        return pair * size + lax.rem(i, jnp.int32(size))

    def todo_of(block, done, length):
        """Blocks of a segment."""
        return jnp.minimum(pl.cdiv(length, BLOCK) - block, read_plan(Column.COUNT) - done)

    def next_of(row, head):
        """Where the next segment starts: row, head, block; and the row's length."""
        wraps = head + 1 == num_heads
        row = jnp.where(wraps, jnp.minimum(row + 1, num_rows - 1), row)
        length = lens_ref[row]
        block = first_block(length, sliding_window, queries_per_row)
        return row, jnp.where(wraps, 0, head + 1), block, length

    start = [read_plan(c) for c in (Column.ROW, Column.HEAD, Column.BLOCK, Column.LENGTH)]
    segments = read_plan(Column.TASKS)
    compute_registers, copy_registers = REGISTERS[config.pairs]

    @pl.when(warpgroup >= config.pairs)
    def _():
        plgpu.set_max_registers(copy_registers, action="decrease")

        in_block = range(max(1, BLOCK // page_size))
        keys, values = pl.ds(0, width), pl.ds(kv_ref.shape[-1] - width, width)

        def pages_of(block, row, last_page):
            first_page = lax.div(block * BLOCK, jnp.int32(page_size))
            return [page_table_ref[row, jnp.minimum(first_page + p, last_page)] for p in in_block]

        def load_blocks(first, end, head, block, done, row, length):
            """Copies a segment's blocks, `done` being those of the worker's segments before."""
            last_page = lax.div(length - 1, jnp.int32(page_size))
            load_one = functools.partial(
                load, head=head, block=block, done=done, row=row, last_page=last_page
            )
            lax.fori_loop(first, end, load_one, pages_of(block + first, row, last_page))

        def load(i, pages, head, block, done, row, last_page):
            next_pages = pages_of(block + i + 1, row, last_page)  # there when it is their turn
            stage, kv_head = slot_of(done + i, config.stages), _div(head, tiles)
            token = (block + i) * BLOCK
            first_page = lax.div(token, jnp.int32(page_size))
            copied = min(BLOCK, page_size)
            offset = lax.rem(token, jnp.int32(page_size)) if page_size > BLOCK else 0
            for part, smem, full, free in (
                (keys, k_smem, k_full, k_free),
                (values, v_smem, v_full, v_free),
            ):

                @pl.when(done + i >= config.stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[stage])

                for p in in_block:

                    def copy(p=p, part=part, smem=smem, full=full):
                        plgpu.copy_gmem_to_smem(
                            kv_ref.at[pages[p], pl.ds(offset, copied), kv_head, part],
                            smem.at[stage, pl.ds(p * copied, copied)],
                            full.at[stage],
                        )

                    if p == 0:
                        copy()
                        continue
                    # Past the row's last page nothing is read, and what lies there masked.
                    is_used = first_page + p <= last_page
                    pl.when(is_used)(copy)
                    pl.when(jnp.logical_not(is_used))(
                        lambda full=full: plgpu.barrier_arrive(full.at[stage])
                    )
            return next_pages

        def segment(j, state):
            row, head, block, length, done = state
            todo = todo_of(block, done, length)
            buffer = slot_of(j, config.query_buffers)

            @pl.when(j >= config.query_buffers)
            def _():
                plgpu.barrier_wait(queries_free.at[buffer])

            plgpu.copy_gmem_to_smem(
                queries_ref.at[row, head, pl.ds(0, columns)],
                queries_smem.at[pl.ds(buffer * columns, columns)],
                queries_full.at[buffer],
            )
            load_blocks(jnp.where(j == 0, early, 0), todo, head, block, done, row, length)
            return *next_of(row, head), done + todo

        row, head, block, length = start
        early = jnp.int32(0)
        if reads_early:
            # Of the first segment what fits the ring, but for blocks with new tokens.
            older = lax.div(length - queries_per_row, jnp.int32(BLOCK)) - block
            room = jnp.minimum(todo_of(block, 0, length), config.stages)
            early = jnp.where(segments > 0, jnp.clip(older, 0, room), 0)
            load_blocks(0, early, head, block, 0, row, length)
            wait_for_inputs(interpret)
        lax.fori_loop(0, segments, segment, (*start, jnp.int32(0)))

        count = read_plan(Column.COUNT)

        # Leave only when all that was sent has been consumed.
        def drain(i, _):
            stage = slot_of(i, config.stages)
            plgpu.barrier_wait(k_free.at[stage])
            plgpu.barrier_wait(v_free.at[stage])
            return ()

        lax.fori_loop(jnp.maximum(count - config.stages, 0), count, drain, ())

        def drain_queries(j, _):
            plgpu.barrier_wait(queries_free.at[slot_of(j, config.query_buffers)])
            return ()

        lax.fori_loop(jnp.maximum(segments - config.query_buffers, 0), segments, drain_queries, ())

    @pl.when(warpgroup < config.pairs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        if reads_early:
            wait_for_inputs(interpret)

        # Rows without work, or else padding: zeros, spread over the workers.
        if has_place:
            live, end = padding_ref[0][0], out_ref.shape[0]
        else:
            live, end = read_plan(Column.LIVE_ROWS), num_rows
        empty = (end - live) * num_heads
        todo_empty = lax.div(empty - worker + config.workers - 1, jnp.int32(config.workers))

        @pl.when(todo_empty > 0)
        def _():
            gpu_merge.write_columns(jnp.zeros((width, columns), jnp.float32), out_smem)

            def clear(i, _):
                task = worker + i * config.workers
                row = live + lax.div(task, jnp.int32(num_heads))
                head = lax.rem(task, jnp.int32(num_heads))
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, pl.ds(0, columns)])
                return ()

            lax.fori_loop(0, todo_empty, clear, ())

        def is_begun(j):
            """Whether another worker began the task of a segment; read anew, to save a register."""
            return (read_plan(Column.STARTER) != worker) & (j == 0)

        def segment(j, state):
            row, head, block, length, done = state
            todo = todo_of(block, done, length)
            buffer = slot_of(j, config.query_buffers)
            plgpu.barrier_wait(queries_full.at[buffer])

            queries = queries_smem.at[pl.ds(buffer * columns, columns)]

            def multiply(i, state):
                """One block of K and V: [tokens, queries] and [width, queries]."""
                out, top, total = state
                stage = slot_of(done + i, config.stages)
                token = (block + i) * BLOCK
                plgpu.barrier_wait(k_full.at[stage])

                def key_query(acc):
                    plgpu.wgmma(acc, k_smem.at[stage], queries.transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(key_query, plgpu.ACC((BLOCK, columns), jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                if soft_cap is None:
                    scores = scores * (sm_scale * LOG2_E)
                else:
                    scores = jnp.tanh(scores * (sm_scale / soft_cap)) * (soft_cap * LOG2_E)
                position = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + token
                newest = length - 1
                if queries_per_row > 1:  # each query sees up to its own position
                    query = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                    query = _div(query + lax.rem(head, jnp.int32(tiles)) * columns, group)
                    newest = newest - jnp.maximum(queries_per_row - 1 - query, 0)
                seen = position <= newest
                if sliding_window is not None:
                    seen = seen & (position > newest - sliding_window)
                scores = jnp.where(seen, scores, reference.MASKED)
                new_top = jnp.maximum(top, over_tokens("max", scores))
                keep = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, (1,)))
                total = total * lax.broadcast_in_dim(keep, total.shape, (1,)) + weights
                weights_smem.transpose((1, 0))[...] = weights.astype(weights_smem.dtype)
                plgpu.barrier_wait(v_full.at[stage])

                # Cache past the row's end may be NaN, which a weight of 0 does not silence.
                @pl.when(token + BLOCK > length)
                def _():
                    some = gpu_merge.COLUMNS  # few at once, for registers' sake
                    value_row = lax.broadcasted_iota(jnp.int32, (BLOCK, some), 0) + token
                    for column in range(0, width, some):
                        part = v_smem.at[stage, :, pl.ds(column, some)]
                        values = part[...]
                        part[...] = jnp.where(value_row < length, values, jnp.zeros_like(values))

                plgpu.commit_smem()
                out = out * lax.broadcast_in_dim(keep, out.shape, (1,))

                def value_weight(acc):
                    values = v_smem.at[stage].transpose((1, 0))
                    plgpu.wgmma(acc, values, weights_smem.transpose((1, 0)))

                if interpret is None:
                    out = pl.run_state(value_weight)(plgpu.ACC.init(out))
                else:  # it can't start from what is there

                    def from_zero(acc):
                        value_weight(acc)
                        return acc[...]

                    out = out + pl.run_scoped(from_zero, plgpu.ACC(out.shape, jnp.float32))
                plgpu.barrier_arrive(v_free.at[stage])
                return out, new_top, total

            top = jnp.full((columns,), reference.MASKED, jnp.float32)
            # Each thread adds up what it has: the sum over tokens is taken once, at the end.
            total = jnp.zeros((BLOCK, columns), jnp.float32)
            if has_sinks:  # a sink counts once, as a key without a value before all others
                begun = is_begun(j)
                sink = plgpu.load(sinks_ref[0].at[head], optimized=False)
                top = sink + jnp.where(begun, reference.MASKED, 0.0)
                total = total + jnp.where(begun, 0.0, 1 / BLOCK)
            out = jnp.zeros((width, columns), jnp.float32)
            out, top, total = lax.fori_loop(0, todo, multiply, (out, top, total))
            plgpu.barrier_arrive(queries_free.at[buffer])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the segment before
            total = over_tokens("add", total)
            out = out * lax.broadcast_in_dim(1 / total, out.shape, (1,))
            begun = is_begun(j)
            goes_on = block + todo < pl.cdiv(length, BLOCK)  # in the next worker

            @pl.when(jnp.logical_not(begun | goes_on))
            def _():
                gpu_merge.write_columns(out, out_smem)
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, pl.ds(0, columns)])

            @pl.when(begun | goes_on)
            def _():
                slot = 2 * worker + jnp.where(begun, 0, 1)
                part_ref[slot] = out
                part_lse_ref[slot] = top + jnp.log2(total)
                if not merge_inside:
                    return
                starter = jnp.where(begun, read_plan(Column.STARTER), worker)
                last = gpu_merge.arrive_last(
                    plan_ref.at[starter, pl.ds(Column.WRITTEN, 1)],
                    word_smem,
                    plan_ref[starter, Column.PARTS],
                )

                @pl.when(last)
                def _():
                    def merge(tile, _):
                        refs = part_ref, part_lse_ref, plan_ref, out_ref, out_smem
                        gpu_merge.merge(starter, tile, *refs)
                        return ()

                    lax.fori_loop(0, columns // gpu_merge.TILE, merge, ())

            return *next_of(row, head), done + todo

        lax.fori_loop(0, segments, segment, (*start, jnp.int32(0)))
        allow_next(interpret)  # not before: its first reads would hold up the ones above
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _over_tokens(kind, x, *, smem, interpret):
    """The maximum or the sum of each column, by way of a warpgroup's own shared memory: Mosaic
    gives all warpgroups the same for reductions over warps (JAX 0.11.2)."""
    if interpret is not None:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(
            (x.shape[1],), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(0)
        ),
    )
    def reduce(_, x, smem):
        return x.reduce(kind, 0, smem)

    return reduce(x, smem)


def _div(a, b: int):
    return lax.div(a, jnp.int32(b))
