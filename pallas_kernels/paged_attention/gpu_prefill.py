"""Chunks of queries against paged keys and values on a Hopper GPU (Pallas, Mosaic GPU).

A call must do 4 N H floating-point operations for each pair of a query and a key that it sees. On
an H200 (JAX 0.11.2, 2026-12-01, 32 heads over 8, width 128, page 16) it does 512 TFLOP/s of the 780
of a large matrix product for 8,192 causal tokens, 510 for 2,048 tokens after 8,192 cached ones.

A tile is 128 neighbouring tokens of one row under one query head, so that queries come from and
outputs go to [T, N, H] as it lies, for any number of queries per kv head. Tiles begin at multiples
of 8 tokens, where TMA can lay them out for the tensor core, and so may begin with up to 7 tokens of
the row before; only their own row's outputs are stored:

    token        0 . . . 4 . . . 8 . . . 12 . . . 16 . . .
    row          0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1  1 2 2 2
    tiles        |row 0 tile...|                              first 0, end 6
                 |row 1 tile .................... |           first 6, end 17
                                             (from 16) |      row 2: first 1

Every block of the grid (one a multiprocessor) walks a list of (tile, head) items, costliest first,
in snake order, so that all finish together. Inside, one warpgroup moves memory and two compute, 64
rows each, after FlashAttention-3 (arXiv:2407.08608, sections 3.1 and 3.2): while a warpgroup does a
block's softmax, its own product with the previous block's values is in flight, and the other
warpgroup's products come between its turns. Key blocks go from the newest to the oldest, so that
the blocks that need a mask come first.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.meta import AttentionMeta, AttentionSpec

TILE = 128  # tokens of a tile: two warpgroups of 64
WARPGROUP_ROWS = 64
ALIGNMENT = 8  # tokens
LEAST = -1e20  # where maxima start: above -inf, so that a row that sees nothing yet makes no NaN
# Of a thread. A launch gives 384 threads 168 each; asking for more in all would wait for ever.
COMPUTE_REGISTERS, MOVER_REGISTERS = 240, 24
assert 2 * COMPUTE_REGISTERS + MOVER_REGISTERS <= 3 * 168
PAGES_AT_ONCE = 4  # looked up; the warpgroup that copies has few registers
OUT_COLUMNS = 16
_Accumulator = plgpu.WGMMAAccumulatorRef
LOG2_E = math.log2(math.e)
SHARED_MEMORY_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel cuts and orders its work.

    block_kv: keys of a block. stages: blocks of keys, and of values, held in shared memory.
    take_turns: the warpgroups alternate at the tensor core. overlap: a block's scores are computed
    while the previous block's values are multiplied. num_blocks: of the grid, one a multiprocessor.
    interpretable: weights go through shared memory and every product gets a fresh accumulator, as
    Pallas's GPU interpreter needs; for tests.
    """

    block_kv: int = 128
    stages: int = 2
    take_turns: bool = True
    overlap: bool = True
    num_blocks: int = 132
    interpretable: bool = False

    def __post_init__(self):
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv is {self.block_kv}; allowed: 64, 128")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; allowed: 2 or more")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; allowed: 1 or more")

    def shared_memory_bytes(self, head_dim: int) -> int:
        """Of two tiles' queries, one's outputs, and blocks of keys and values; barriers aside."""
        return 2 * (3 * TILE + 2 * self.stages * self.block_kv) * head_dim


def default_config(spec: AttentionSpec) -> Config:
    """What was fastest on an H200 for 8,192 causal tokens, and for a window of 4,096."""
    return Config(block_kv=128, stages=2 * (128 // spec.head_dim), overlap=False)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernel can't do a case, or None where it can."""
    if spec.head_dim not in (64, 128):
        return f"head width {spec.head_dim} (64 and 128 work)"
    if spec.kv_dtype not in ("bfloat16", "float16"):
        return f"a {spec.kv_dtype} cache (bfloat16 and float16 work)"
    if spec.page_size not in (16, 32, 64, 128):
        return f"page size {spec.page_size} (16, 32, 64 and 128 work)"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of a step, costliest first; the same for all layers.

    Columns of `tiles`: row; first token (a multiple of 8); position of that token in the row,
    negative where it is another row's; first and end of the tokens that are the row's own, counted
    from the first token; the row's kv_len; two unused.
    """

    tiles: Int[Array, "tiles 8"]
    num_tiles: Int[Array, "1"]


def max_tiles(num_tokens: int, num_rows: int) -> int:
    """The most tiles that a step can have: each row adds less than a tile and 7 tokens."""
    rows = min(num_rows, num_tokens)
    return (num_tokens + rows * (TILE - 1 + ALIGNMENT - 1)) // TILE


@jax.named_scope("prefill_plan")
def make_plan(meta: AttentionMeta, num_tokens: int, sliding_window: int | None = None) -> Plan:
    """Cuts the rows with chunks into tiles."""
    num_rows = len(meta.kv_lens)
    start = meta.query_start[:-1]
    length = meta.query_start[1:] - start
    is_chunk = (jnp.arange(num_rows) >= meta.num_decode_rows) & (meta.kv_lens > 0)
    skew = start % ALIGNMENT
    count = jnp.where(is_chunk & (length > 0), (skew + length + TILE - 1) // TILE, 0)
    ends = jnp.cumsum(count)

    tile = jnp.arange(max_tiles(num_tokens, num_rows))
    row = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1), num_rows - 1)
    offset = (tile - (ends - count)[row]) * TILE - skew[
        row
    ]  # in the row, of the tile's first token
    first = jnp.maximum(-offset, 0)
    end = jnp.minimum(length[row] - offset, TILE)
    position = meta.kv_lens[row] - length[row] + offset
    columns = [row, start[row] + offset, position, first, end, meta.kv_lens[row]]
    columns += [jnp.zeros_like(row)] * 2

    # Sorted by counting, which fuses, where a sort of so few is several kernels.
    cost = position + end
    if sliding_window is not None:
        cost = jnp.minimum(cost, sliding_window + TILE)
    cost = jnp.where(tile < ends[-1], cost, -1)
    before = (cost[None] > cost[:, None]) | (
        (cost[None] == cost[:, None]) & (tile[None] < tile[:, None])
    )
    rank = before.sum(axis=1)
    order = jnp.sum(jnp.where(rank[None] == tile[:, None], tile[None], 0), axis=1)
    tiles = jnp.stack(columns, axis=1).astype(jnp.int32)[order]
    return Plan(tiles, ends[-1:].astype(jnp.int32))


def attend_chunks(
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    plan: Plan | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """Rows from `num_decode_rows` on, written over `out`, whose other tokens stay as they are.

    plan: `make_plan` of the same step and window, where the caller shares it between layers.
    interpret: a `plgpu.InterpretGPUParams`, with an `interpretable` config, to run on a CPU.
    Raises NotImplementedError for a head width, cache dtype or page size that it can't do.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = kv_pages.shape
    num_kv_heads //= 2
    spec = AttentionSpec(
        kind="mixed",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=kv_pages.dtype.name,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
    )
    if reason := unsupported(spec):
        raise NotImplementedError(f"the GPU kernel for chunks can't do {reason}")
    if q.dtype != kv_pages.dtype:
        raise NotImplementedError(
            f"the GPU kernel for chunks: q is {q.dtype}, the cache {spec.kv_dtype}"
        )
    if sm_scale <= 0:
        raise ValueError(f"sm_scale is {sm_scale}; allowed: above 0")
    config = config or default_config(spec)
    if page_size > config.block_kv:
        raise ValueError(f"block_kv is {config.block_kv}, less than a page of {page_size}")
    needed = config.shared_memory_bytes(head_dim)
    if not config.interpretable and needed > SHARED_MEMORY_BYTES - 1024:
        raise ValueError(f"{config} needs more shared memory than a multiprocessor has")
    if plan is None:
        plan = make_plan(meta, num_tokens, sliding_window)
    # A tile's copy is cut at the end of q, which has to lie at a multiple of 8 tokens. (The
    # interpreter doesn't cut.)
    padding = TILE if config.interpretable else -num_tokens % ALIGNMENT
    if padding:
        q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))

    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config, sm_scale=sm_scale),
        out_type=(),
        scratch_types=_scratch(spec, config, q.dtype),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )
    result = jax.new_ref(out)
    operands = [] if sinks is None else [sinks.astype(jnp.float32)]
    kernel(q, kv_pages, meta.page_table, plan.tiles, plan.num_tiles, *operands, result)
    return result[...]


def _scratch(spec: AttentionSpec, config: Config, dtype) -> dict[str, Any]:
    """Shared memory, and barriers that order its use."""
    layout = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    rows, width = WARPGROUP_ROWS, spec.head_dim
    pages_per_block = config.block_kv // spec.page_size
    block = (config.stages, config.block_kv, width)
    full = plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    scratch = {
        "q_smem": plgpu.SMEM((2, 2, rows, width), dtype, transforms=layout),
        "k_smem": plgpu.SMEM(block, dtype, transforms=layout),
        "v_smem": plgpu.SMEM(block, dtype, transforms=layout),
        "out_smem": plgpu.SMEM((2, rows, width), dtype),
        "weights_smem": None,
        # Of items in turn: one's queries are there before the last one's are done with.
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "cleaned": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_barriers=2),  # whose products come next
    }
    if config.interpretable:
        scratch["weights_smem"] = plgpu.SMEM((2, rows, config.block_kv), dtype, transforms=layout)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Scalars of one tile, and which blocks of keys it goes through, newest first."""

    ref: Any  # of its line of the plan
    row: Any
    token: Any
    position: Any
    kv_len: Any
    newest: Any  # block
    steps: Any  # blocks
    diagonal_end: Any  # first step whose block all of the tile's queries see whole
    full_end: Any  # first step after those


def _read_tile(ref, block_kv, window) -> _Tile:
    row, token, position, first, end, kv_len = (ref[i] for i in range(6))
    oldest_query, newest_query = position + first, position + end - 1
    newest = _div(newest_query, block_kv)
    oldest = jnp.int32(0)
    if window is not None:
        oldest = _div(jnp.maximum(oldest_query - (window - 1), 0), block_kv)
    full_end = steps = newest - oldest + 1
    diagonal_end = jnp.clip(newest + 1 - _div(oldest_query + 1, block_kv), 1, steps)
    if window is not None:
        oldest_full = _div(jnp.maximum(newest_query - (window - 1), 0) + block_kv - 1, block_kv)
        full_end = jnp.clip(newest + 1 - oldest_full, diagonal_end, steps)
    return _Tile(ref, row, token, position, kv_len, newest, steps, diagonal_end, full_end)


def _kernel(
    q_ref,
    kv_ref,
    page_table_ref,
    tiles_ref,
    num_tiles_ref,
    *refs,
    spec: AttentionSpec,
    config: Config,
    sm_scale: float,
    q_smem,
    k_smem,
    v_smem,
    out_smem,
    weights_smem,
    q_full,
    q_free,
    cleaned,
    k_full,
    v_full,
    k_free,
    v_free,
    turn,
):
    *sinks_ref, out_ref = refs
    warpgroup = lax.axis_index("warpgroup")
    block_kv, stages = config.block_kv, config.stages
    page_size, width = spec.page_size, spec.head_dim
    rows = WARPGROUP_ROWS
    dtype = q_smem.dtype
    window = spec.sliding_window

    def each_item(do):
        """do(tile, head, round, step at which it begins) for this block's items; rounds, steps."""
        block, grid = lax.axis_index("block"), config.num_blocks

        def item_of(round_):
            place = jnp.where(lax.rem(round_, jnp.int32(2)) == 0, block, grid - 1 - block)
            item = round_ * grid + place
            return item, item < num_tiles_ref[0] * spec.num_heads

        def one(carry):
            round_, begin, _ = carry
            item, _ = item_of(round_)
            tile = _read_tile(tiles_ref.at[_div(item, spec.num_heads)], block_kv, window)
            do(tile, lax.rem(item, jnp.int32(spec.num_heads)), round_, begin)
            # Whether there is another is found out anew: its count would take a register.
            _, more = item_of(round_ + 1)
            return round_ + 1, begin + tile.steps, more

        zero = jnp.int32(0)
        return lax.while_loop(lambda carry: carry[2], one, (zero, zero, item_of(zero)[1]))[:2]

    @pl.when(warpgroup == 2)
    def _move():
        plgpu.set_max_registers(MOVER_REGISTERS, action="decrease")
        pages_per_block = block_kv // page_size

        def item(tile, head, round_, begin):
            parity = lax.rem(round_, jnp.int32(2))
            pl.when(round_ >= 2)(lambda: plgpu.barrier_wait(q_free.at[parity]))
            for i in range(2):
                token = pl.multiple_of(tile.token + i * rows, ALIGNMENT)
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(token, rows), head], q_smem.at[parity, i], q_full.at[parity]
                )
            kv_head = _div(head, spec.group)
            last_page = _div(tile.kv_len - 1, page_size)

            def step(j, _):
                slot = lax.rem(begin + j, jnp.int32(stages))
                entry = (tile.newest - j) * pages_per_block

                def copy(which, smem, full, free):
                    pl.when(begin + j >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for at in range(0, pages_per_block, PAGES_AT_ONCE):
                        entries = range(at, min(at + PAGES_AT_ONCE, pages_per_block))
                        pages = [
                            page_table_ref[tile.row, jnp.minimum(entry + i, last_page)]
                            for i in entries
                        ]
                        for i, page in zip(entries, pages, strict=True):
                            plgpu.copy_gmem_to_smem(
                                kv_ref.at[page, :, 2 * kv_head + which],
                                smem.at[slot, pl.ds(i * page_size, page_size)],
                                full.at[slot],
                            )

                copy(0, k_smem, k_full, k_free)
                copy(1, v_smem, v_full, v_free)
                return ()

            lax.fori_loop(0, tile.steps, step, ())

        rounds, steps = each_item(item)

        # All is over once everything has been given back.
        for back in (1, 2):

            @pl.when(rounds >= back)
            def _(back=back):
                plgpu.barrier_wait(q_free.at[lax.rem(rounds - back, 2)])

        def last(step, _):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])
            return ()

        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, last, ())

    def compute(accumulator):
        """accumulator: of a tile's output, or None where each product has one of its own."""
        my_out = out_smem.at[warpgroup]
        # Scores times `factor` are in units of log 2; with a cap, what the cap leaves of them.
        factor = sm_scale * LOG2_E if spec.soft_cap is None else spec.soft_cap * LOG2_E

        def take_turn():
            if config.take_turns:
                plgpu.barrier_wait(turn.at[warpgroup])

        def end_turn():
            if config.take_turns:
                plgpu.barrier_arrive(turn.at[1 - warpgroup])

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def scores_of(my_q, slot, meanwhile=None):
            """Queries times keys of a slot. meanwhile: starts a product that goes on after."""

            def product(scores):
                plgpu.wgmma(scores, my_q, k_smem.at[slot].transpose((1, 0)))
                if meanwhile is not None:
                    meanwhile()
                end_turn()
                return plgpu.wgmma_accumulator_load(scores, wait_n=0 if meanwhile is None else 1)

            plgpu.barrier_wait(k_full.at[slot])
            take_turn()
            scores = pl.run_scoped(product, _Accumulator((rows, block_kv), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            return scores

        def operand(weights):
            """Rounded, in registers or, for the interpreter, in shared memory."""
            weights = weights.astype(dtype)
            if not config.interpretable:
                return weights
            weights_smem[warpgroup] = weights
            plgpu.commit_smem()
            return ()

        def add_values(weights, slot, out):
            """Starts adding weights times values of a slot to the accumulator; or to `out`."""
            values = v_smem.at[slot]
            if not config.interpretable:
                plgpu.wgmma(accumulator, weights, values)
                return out

            def product(fresh):
                plgpu.wgmma(fresh, weights_smem.at[warpgroup], values)
                return fresh[...]

            return out + pl.run_scoped(product, _Accumulator((rows, width), jnp.float32))

        def item(tile, head, round_, begin):
            parity = lax.rem(round_, jnp.int32(2))
            my_q = q_smem.at[parity, warpgroup]

            def weigh(scores, step, top, total, masked):
                """(weights, new maximum and sum, what earlier sums are worth) of a block."""
                if spec.soft_cap is not None:
                    scores = jnp.tanh(scores * (sm_scale / spec.soft_cap))
                if masked:
                    first_key = (tile.newest + begin - step) * block_kv
                    age = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
                    age += tile.position + warpgroup * rows - first_key
                    age -= lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                    seen = age >= 0
                    if window is not None:
                        seen &= age < window
                    scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, scores.max(axis=1) * factor)
                keep = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores * factor - _across(new_top, scores.shape))
                total = total * keep + weights.sum(axis=1)
                return weights, new_top, total, keep

            def clean(slot):
                """Values past the row's end may be NaN, and 0 * NaN is NaN: makes them zeros."""

                @pl.when((tile.newest + 1) * block_kv > tile.kv_len)
                def _clean():
                    for chunk in range(block_kv // rows):

                        @pl.when(warpgroup == chunk % 2)
                        def _(chunk=chunk):
                            values = v_smem.at[slot, pl.ds(chunk * rows, rows)]
                            key = lax.broadcasted_iota(jnp.int32, (rows, width), 0)
                            key += tile.newest * block_kv + chunk * rows
                            zero = jnp.zeros((), dtype)
                            values[...] = jnp.where(key < tile.kv_len, values[...], zero)

                    plgpu.commit_smem()
                    plgpu.barrier_arrive(cleaned.at[parity])
                    plgpu.barrier_wait(cleaned.at[parity])

            def block_overlapped(step, carry, masked):
                """Scores and softmax of a block while the previous block's values are added."""
                weights, top, total, out = carry
                slot, previous = slot_of(step), slot_of(step - 1)
                if config.interpretable:
                    scores = scores_of(my_q, slot)
                    out = add_values(weights, previous, out)
                else:
                    scores = scores_of(my_q, slot, lambda: add_values(weights, previous, out))
                found = weigh(scores, step, top, total, masked)
                weights, top, total, keep = lax.optimization_barrier(found)
                plgpu.barrier_wait(v_full.at[slot])
                keep = _across(keep, (rows, width))
                if config.interpretable:
                    out = out * keep
                    plgpu.barrier_arrive(v_free.at[previous])
                else:
                    so_far = accumulator[...]  # waits for the product
                    plgpu.barrier_arrive(v_free.at[previous])
                    # Only now: the product reads its weights from the registers that these get.
                    weights = lax.optimization_barrier(weights)
                    accumulator[...] = so_far * keep
                return operand(weights), top, total, out

            def block_alone(step, carry, masked, newest=False):
                """Scores, softmax and values of a block, one after the other."""
                _, top, total, out = carry
                slot = slot_of(step)
                scores = scores_of(my_q, slot)
                found = weigh(scores, step, top, total, masked)
                weights, top, total, keep = lax.optimization_barrier(found)
                plgpu.barrier_wait(v_full.at[slot])
                if newest:
                    clean(slot)
                keep = _across(keep, (rows, width))
                if config.interpretable:
                    out = out * keep
                else:
                    accumulator[...] = accumulator[...] * keep
                weights = operand(weights)
                take_turn()
                out = add_values(weights, slot, out)
                end_turn()
                if not config.interpretable:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_free.at[slot])
                return (), top, total, out

            if sinks_ref:  # as one more key, seen first, without a value
                top = jnp.full((rows,), sinks_ref[0][head] * LOG2_E, jnp.float32)
                total = jnp.ones((rows,), jnp.float32)
            else:
                top = jnp.full((rows,), LEAST, jnp.float32)
                total = jnp.zeros((rows,), jnp.float32)
            out = jnp.zeros((rows, width), jnp.float32)
            if not config.interpretable:
                accumulator[...] = out
                out = ()

            plgpu.barrier_wait(q_full.at[parity])
            if config.overlap:
                slot = slot_of(begin)
                found = weigh(scores_of(my_q, slot), begin, top, total, masked=True)
                weights, top, total, _ = found
                carry = (operand(weights), top, total, out)
                plgpu.barrier_wait(v_full.at[slot])
                clean(slot)
                block = block_overlapped
            else:
                carry = block_alone(begin, ((), top, total, out), masked=True, newest=True)
                block = block_alone
            masked, plain = (functools.partial(block, masked=masked) for masked in (True, False))
            diagonal_end, full_end = begin + tile.diagonal_end, begin + tile.full_end
            carry = lax.fori_loop(begin + 1, diagonal_end, masked, carry)
            carry = lax.fori_loop(diagonal_end, full_end, plain, carry)
            if window is not None:
                carry = lax.fori_loop(full_end, begin + tile.steps, masked, carry)
            weights, _, total, out = carry
            plgpu.barrier_arrive(q_free.at[parity])

            # Read again, rather than kept in registers for so long.
            first_token, first, end = (tile.ref[i] for i in (1, 3, 4))
            first_token += warpgroup * rows
            first_row = jnp.clip(first - warpgroup * rows, 0, rows)
            count = jnp.clip(end - warpgroup * rows, 0, rows) - first_row

            if config.overlap:
                slot = slot_of(begin + tile.steps - 1)
                take_turn()
                out = add_values(weights, slot, out)
                end_turn()
                if not config.interpretable:
                    out = accumulator[...]
                plgpu.barrier_arrive(v_free.at[slot])
            elif not config.interpretable:
                out = accumulator[...]
            out = out * _across(1 / total, out.shape)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before
            out = out.astype(dtype)
            # In parts, so that few addresses are kept in registers from item to item.
            for column in range(0, width, OUT_COLUMNS):
                part = slice(column, column + OUT_COLUMNS)
                my_out[:, part] = out[:, part]
            plgpu.commit_smem()

            def store(row, count):
                plgpu.copy_smem_to_gmem(
                    my_out.at[pl.ds(row, count)],
                    out_ref.at[pl.ds(first_token + row, count), head],
                )

            pl.when(count == rows)(lambda: store(0, rows))

            @pl.when(count != rows)
            def _store_some():
                row = first_row
                for power in (32, 16, 8, 4, 2, 1):
                    has = (count & power) != 0
                    pl.when(has)(functools.partial(store, row, power))
                    row += jnp.where(has, power, 0)

        each_item(item)
        plgpu.wait_smem_to_gmem(0)
        if config.interpretable and config.take_turns:  # it insists that every arrival is seen
            pl.when(warpgroup == 0)(take_turn)

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        if config.take_turns:
            plgpu.barrier_arrive(turn.at[1 - warpgroup], predicate=warpgroup == 1)
        if config.interpretable:
            compute(None)
        else:
            pl.run_scoped(compute, _Accumulator((rows, width), jnp.float32))


def _div(a, b: int):
    return lax.div(a, jnp.int32(b))


def _across(column, shape):
    return lax.broadcast_in_dim(column, shape, (0,))
