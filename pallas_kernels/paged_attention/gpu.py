"""Paged attention on a Hopper GPU: a Pallas Mosaic GPU kernel for rows with one query.

In a "mixed" call rows from `num_decode_rows` on go through `gpu_prefill`, or where that can't do
the case through `reference.attend_chunks`, which XLA compiles for the GPU.

A decode call must read kv_len x 2 K H elements a row and little else. On an H200 (JAX 0.11.2,
2026-11-30, 32 heads over 8, width 128, page 16) a whole call with its plan runs at 95 % of the copy
rate at 32 rows of 8k, 89 % at 64 of 4k, 91 % at 256 of 1k, but 44 % at one row of 32k.

Blocks of all (row, kv head) tasks form one flat list that is cut into equal ranges, one a worker
(a thread block that stays on its multiprocessor), so a ragged batch and a single long row both
fill the card (Stream-K, arXiv:2301.03598; split-KV, arXiv:2311.01282 section 3):

    task      |  0  |       1        | 2 |   3    |     blocks of (row, kv head), rows in order
    worker    |   0    |   1    |   2    |   3    |     equal shares
    writes      out  p1   p2      p4  out    out        p: a partial result

A task that one worker does alone goes straight to the output. A worker's range splits two tasks at
most: the one it continues, whose partial result it keeps at slot 2 * worker, and the one that goes
on in the next worker, at 2 * worker + 1. A second, small kernel merges the partial results of each
split task and writes them to the output in place, so its work follows the number of workers.

Each worker is two warpgroups: one issues the copies of pages into a ring in shared memory, the
other multiplies. A kv head's queries are rows of a 64-row matrix, of which G are real; what the
others hold is never written.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import gpu_prefill, reference
from pallas_kernels.paged_attention.meta import AttentionMeta, AttentionSpec, Kind

plgpu: Any = mosaic_gpu  # whose annotations call its transforms abstract and its ACC private

BLOCK = 64  # tokens; also the rows of a wgmma
LANES = 32  # columns of a partial result that lie together
MERGE_AT_ONCE = 4  # parts
SHARED_BYTES = 227 << 10  # that a thread block may have on Hopper
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """workers: thread blocks, one a multiprocessor. stages: blocks of K and V in flight each."""

    workers: int = 132
    stages: int = 4
    query_buffers: int = 2

    def __post_init__(self):
        for name, low in (("workers", 1), ("stages", 2), ("query_buffers", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {low} or more")

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory a worker takes, near enough."""
        ring = self.stages * 2 * BLOCK * head_dim * 2
        queries = self.query_buffers * BLOCK * head_dim * 2
        return ring + queries + BLOCK * head_dim * 4 + 2048


def default_config(spec: AttentionSpec, workers: int = 132) -> Config:
    """As many stages as fit (8 at most: the study gained nothing from more than 4 at width 128)."""
    for stages, query_buffers in ((8, 2), (4, 2), (3, 2), (2, 2), (2, 1)):
        config = Config(workers, stages, query_buffers)
        if config.shared_bytes(spec.head_dim) <= SHARED_BYTES:
            return config
    raise NotImplementedError(f"head width {spec.head_dim} does not fit shared memory")


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernel can't do a case, or None where it can."""
    if spec.head_dim not in (64, 128, 256):
        return f"head width {spec.head_dim} (64, 128 and 256 work)"
    if spec.group > 16:
        return f"{spec.group} queries a kv head (16 at most)"
    if spec.kv_dtype not in ("bfloat16", "float16"):
        return f"a {spec.kv_dtype} cache (bfloat16 and float16 work)"
    if spec.page_size not in (8, 16, 32, 64, 128):
        return f"page size {spec.page_size} (8, 16, 32, 64 and 128 work)"
    return None


class Plan(NamedTuple):
    """The flat list of work, the same for every layer of a step. Rows with work come first."""

    rows: Int[Array, "S"]  # place in the list -> row
    lens: Int[Array, "S"]  # by place
    first_block: Int[Array, "S"]  # by place; later than 0 only with a sliding window
    work: Int[Array, "workers 6"]  # place, head and block to start at; blocks; segments; live rows
    splits: Int[Array, "workers 3"]  # of the task begun but not ended: row, head, parts (or 0)


def make_plan(
    kv_lens: Int[Array, "S"], num_kv_heads: int, sliding_window: int | None, config: Config
) -> Plan:
    """Cuts the batch's blocks into equal shares. A few thousand integer operations."""
    num_rows = len(kv_lens)
    first = jnp.maximum(kv_lens - sliding_window, 0) // BLOCK if sliding_window else 0 * kv_lens
    blocks = (kv_lens + BLOCK - 1) // BLOCK - first
    live = blocks > 0
    num_live = jnp.sum(live, dtype=jnp.int32)
    place = jnp.where(live, jnp.cumsum(live) - 1, num_live + jnp.cumsum(~live) - 1)
    rows = jnp.zeros_like(kv_lens).at[place].set(jnp.arange(num_rows, dtype=kv_lens.dtype))
    placed_blocks = blocks[rows]
    ends = jnp.cumsum(placed_blocks) * num_kv_heads
    total = ends[-1]
    share = jnp.maximum((total + config.workers - 1) // config.workers, 1)

    def locate(flat):  # [W] -> place, head, block from the row's first, blocks of the row
        at = jnp.minimum(jnp.sum(flat[:, None] >= ends, axis=1), num_rows - 1)
        inside = flat - (ends - placed_blocks * num_kv_heads)[at]
        width = jnp.maximum(placed_blocks[at], 1)
        return at, inside // width, inside % width, width

    worker = jnp.arange(config.workers)
    start = worker * share
    count = jnp.clip(total - start, 0, share)
    at, head, block, _ = locate(jnp.minimum(start, jnp.maximum(total - 1, 0)))
    last = jnp.clip(start + count - 1, 0, jnp.maximum(total - 1, 0))
    last_at, last_head, last_block, width = locate(last)
    segments = jnp.where(count > 0, (last_at - at) * num_kv_heads + last_head - head + 1, 0)
    work = jnp.stack(
        [at, head, block + first[rows][at], count, segments, 0 * worker + num_live], axis=1
    )
    task_end = last - last_block + width
    is_split = (count > 0) & (last_block < count) & (task_end > start + count)
    parts = jnp.where(is_split, (task_end - 1) // share - worker + 1, 0)
    splits = jnp.stack([rows[last_at], last_head, parts], axis=1)
    return Plan(
        rows=rows,
        lens=kv_lens[rows],
        first_block=first[rows],
        work=work.astype(jnp.int32),
        splits=splits.astype(jnp.int32),
    )


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
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """As `reference.attend`. Raises NotImplementedError naming what the kernel can't do.

    interpret: Pallas's `InterpretGPUParams`, to run on a CPU.
    """
    spec = AttentionSpec(
        kind=kind,
        num_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[2] // 2,
        head_dim=q.shape[2],
        page_size=kv_pages.shape[1],
        kv_dtype=kv_pages.dtype.name,
    )
    if reason := unsupported(spec):
        raise NotImplementedError(
            f"the GPU kernel of paged attention can't do {reason}; impl='reference' can"
        )
    rows = functools.partial(
        attend_rows, config=config or default_config(spec), interpret=interpret
    )
    chunks = None
    if kind == "mixed" and gpu_prefill.unsupported(spec) is None:
        chunks = functools.partial(
            gpu_prefill.attend_chunks,
            config=dataclasses.replace(
                gpu_prefill.default_config(spec), interpretable=interpret is not None
            ),
            interpret=interpret,
        )
    return reference.attend(
        q,
        kv_pages,
        meta,
        sm_scale=sm_scale,
        kind=kind,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        rows_kernel=rows,
        chunks_kernel=chunks,
    )


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
    config: Config,
    interpret: Any = None,
) -> Float[Array, "S N H"]:
    """One query a row, each its sequence's newest token. Zeros for rows of length 0."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_parts, _ = kv_pages.shape
    num_kv_heads = num_parts // 2
    group = num_heads // num_kv_heads
    rows = 8 * math.ceil(group / 8)  # copies into tiled shared memory move 8 rows at least
    dtype = kv_pages.dtype
    plan = make_plan(kv_lens, num_kv_heads, sliding_window, config)
    interpreted = interpret is not None
    options = {"interpret": interpret} if interpreted else {}
    # A copy may reach past an array's end: nothing is read or written there. That serves where one
    # tile of 8 rows holds a head's queries, though not in the interpreter.
    stored = group if group <= 8 and not interpreted else rows
    queries = q.reshape(num_rows, num_kv_heads, group, head_dim).astype(dtype)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, stored - group), (0, 0)))
    inputs = [queries, kv_pages, page_table, plan.rows, plan.lens, plan.first_block, plan.work]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group) * LOG2_E
        inputs.append(jnp.pad(sinks, ((0, 0), (0, BLOCK - group))))
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiled_f32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    copies = max(1, BLOCK // page_size)
    ring = plgpu.SMEM((config.stages, BLOCK, head_dim), dtype, transforms=tiled)
    scratch = {
        "queries_smem": plgpu.SMEM(
            (config.query_buffers, BLOCK, head_dim), dtype, transforms=tiled
        ),
        "k_smem": ring,
        "v_smem": ring,
        "out_smem": plgpu.RefUnion(  # of a whole task, or of a part of one
            plgpu.SMEM((BLOCK, head_dim), dtype, transforms=tiled),
            plgpu.SMEM((BLOCK, head_dim), jnp.float32, transforms=tiled_f32),
        ),
        # The interpreter has no multiplication whose left side is in registers.
        "weights_smem": plgpu.SMEM((BLOCK, BLOCK), dtype, transforms=tiled)
        if interpreted
        else None,
        "queries_full": plgpu.Barrier(num_barriers=config.query_buffers),
        "queries_free": plgpu.Barrier(num_barriers=config.query_buffers),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        "k_free": plgpu.Barrier(num_barriers=config.stages),
        "v_free": plgpu.Barrier(num_barriers=config.stages),
    }
    body = functools.partial(
        _worker,
        has_sinks=sinks is not None,
        rows=rows,
        page_size=page_size,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        config=config,
    )
    compiler_params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    )
    slots = 2 * config.workers
    out, part, part_lse = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, stored, head_dim), dtype),
            jax.ShapeDtypeStruct((slots, rows // 8, head_dim // LANES, 8, LANES), jnp.float32),
            jax.ShapeDtypeStruct((slots, BLOCK, LANES), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=compiler_params,
        **options,
    )(*inputs)
    out_ref = jax.new_ref(out)
    merge: Any = pl.kernel(
        functools.partial(_merge_in_scope, out_ref=out_ref),
        mesh=plgpu.Mesh(grid=(config.workers, rows // 8), grid_names=("worker", "tile")),
        compiler_params=compiler_params,
        name="paged_decode_merge",
        **options,
    )
    merge(part, part_lse, plan.splits)
    out = jax.freeze(out_ref)[:, :, :group]
    return out.reshape(q.shape).astype(q.dtype)


def _merge_in_scope(*refs, out_ref):
    """`_merge` with its shared memory."""
    shape = refs[0].shape[2:]
    pl.run_scoped(
        functools.partial(_merge, *refs, out_ref),
        plgpu.SMEM(shape, out_ref.dtype),
    )


def _merge(part_ref, lse_ref, splits_ref, out_ref, out_smem):
    """Weighs the parts of the task that this worker began and others went on with; writes it."""
    worker, tile = lax.axis_index("worker"), lax.axis_index("tile")
    _, _, columns, rows, lanes = part_ref.shape
    row, head, parts = (splits_ref[worker, i] for i in range(3))

    @pl.when(parts > 0)
    def _():
        def step(i, state):
            top, total, *outs = state
            lses, values = [], []
            for j in range(MERGE_AT_ONCE):  # loads of several parts, to wait for all together
                part = jnp.minimum(i * MERGE_AT_ONCE + j, parts - 1)
                slot = 2 * (worker + part) + jnp.where(part == 0, 1, 0)
                surplus = jnp.where(i * MERGE_AT_ONCE + j < parts, 0.0, reference.MASKED)
                lses.append(lse_ref[slot, pl.ds(tile * rows, rows)] + surplus)
                values.append([part_ref[slot, tile, column] for column in range(columns)])
            new_top = functools.reduce(jnp.maximum, lses, top)
            keep = jnp.exp2(top - new_top)
            weights = [jnp.exp2(lse - new_top) for lse in lses]
            total = sum(weights, total * keep)
            outs = [
                sum((w * v[c] for w, v in zip(weights, values, strict=True)), out * keep)
                for c, out in enumerate(outs)
            ]
            return new_top, total, *outs

        shape = (rows, lanes)
        zeros = jnp.zeros(shape, jnp.float32)
        _, total, *outs = lax.fori_loop(
            0,
            pl.cdiv(parts, MERGE_AT_ONCE),
            step,
            (jnp.full(shape, reference.MASKED, jnp.float32), zeros, *[zeros] * columns),
        )
        scale = 1 / total
        for column, out in enumerate(outs):
            out_smem[column] = (out * scale).astype(out_smem.dtype)
        plgpu.commit_smem()
        for column in range(columns):
            plgpu.copy_smem_to_gmem(
                out_smem.at[column],
                out_ref.at[row, head, pl.ds(tile * rows, rows), pl.ds(column * lanes, lanes)],
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _worker(
    queries_ref,
    kv_ref,
    page_table_ref,
    rows_ref,
    lens_ref,
    first_ref,
    work_ref,
    *rest_refs,
    queries_smem,
    k_smem,
    v_smem,
    out_smem,
    weights_smem,
    queries_full,
    queries_free,
    k_full,
    v_full,
    k_free,
    v_free,
    has_sinks,
    rows,
    page_size,
    sm_scale,
    sliding_window,
    soft_cap,
    config,
):
    *sinks_ref, out_ref, part_ref, part_lse_ref = rest_refs
    assert len(sinks_ref) == has_sinks
    num_kv_heads = out_ref.shape[1]
    whole_smem, part_smem = out_smem
    worker = lax.axis_index("worker")
    warpgroup = lax.axis_index("warpgroup")
    num_places = lens_ref.shape[0]
    head_dim = k_smem.shape[-1]
    stages = config.stages
    start_place, start_head, start_block = (work_ref[worker, i] for i in range(3))
    count, segments = work_ref[worker, 3], work_ref[worker, 4]

    def segment_of(place, head, block, done):
        """Length of the row, blocks to do, and where the next segment starts."""
        length = lens_ref[place]
        todo = jnp.minimum(pl.cdiv(length, BLOCK) - block, count - done)
        wraps = head + 1 == num_kv_heads
        next_place = jnp.where(wraps, jnp.minimum(place + 1, num_places - 1), place)
        return length, todo, next_place, jnp.where(wraps, 0, head + 1)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def segment(j, state):
            place, head, block, done = state
            length, todo, next_place, next_head = segment_of(place, head, block, done)
            row = rows_ref[place]
            last_page = lax.div(length - 1, jnp.int32(page_size))
            buffer = lax.rem(j, jnp.int32(config.query_buffers))

            @pl.when(j >= config.query_buffers)
            def _():
                plgpu.barrier_wait(queries_free.at[buffer])

            plgpu.copy_gmem_to_smem(
                queries_ref.at[row, head, pl.ds(0, rows)],
                queries_smem.at[buffer, pl.ds(0, rows)],
                queries_full.at[buffer],
            )

            def load(i, _):
                stage = lax.rem(done + i, jnp.int32(stages))
                token = (block + i) * BLOCK
                # Past the row's last page: that page again, to be masked.
                pages = [
                    page_table_ref[
                        row,
                        jnp.minimum(lax.div(token, jnp.int32(page_size)) + p, last_page),
                    ]
                    for p in range(max(1, BLOCK // page_size))
                ]
                copied = min(BLOCK, page_size)
                offset = lax.rem(token, jnp.int32(page_size)) if page_size > BLOCK else 0
                for part, smem, full, free in (
                    (0, k_smem, k_full, k_free),
                    (1, v_smem, v_full, v_free),
                ):

                    @pl.when(done + i >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[stage])

                    for p, page in enumerate(pages):
                        plgpu.copy_gmem_to_smem(
                            kv_ref.at[page, pl.ds(offset, copied), 2 * head + part],
                            smem.at[stage, pl.ds(p * copied, copied)],
                            full.at[stage],
                        )
                return ()

            lax.fori_loop(0, todo, load, ())
            return next_place, next_head, first_ref[next_place], done + todo

        lax.fori_loop(0, segments, segment, (start_place, start_head, start_block, jnp.int32(0)))

        # Leave only when all that was sent has been consumed.
        def drain(i, _):
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(k_free.at[stage])
            plgpu.barrier_wait(v_free.at[stage])
            return ()

        lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, ())

        def drain_queries(j, _):
            plgpu.barrier_wait(queries_free.at[lax.rem(j, jnp.int32(config.query_buffers))])
            return ()

        lax.fori_loop(jnp.maximum(segments - config.query_buffers, 0), segments, drain_queries, ())

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(240, action="increase")

        # Rows without work: zeros, spread over the workers.
        live = work_ref[worker, 5]
        continues = start_block > first_ref[start_place]  # a task that the worker before began
        empty = (num_places - live) * num_kv_heads
        todo_empty = lax.div(empty - worker + config.workers - 1, jnp.int32(config.workers))

        @pl.when(todo_empty > 0)
        def _():
            whole_smem[...] = jnp.zeros(whole_smem.shape, whole_smem.dtype)
            plgpu.commit_smem()

            def clear(i, _):
                task = worker + i * config.workers
                row = rows_ref[live + lax.div(task, jnp.int32(num_kv_heads))]
                plgpu.copy_smem_to_gmem(
                    whole_smem.at[pl.ds(0, rows)],
                    out_ref.at[row, lax.rem(task, jnp.int32(num_kv_heads)), pl.ds(0, rows)],
                )
                return ()

            lax.fori_loop(0, todo_empty, clear, ())

        def segment(j, state):
            place, head, block, done = state
            length, todo, next_place, next_head = segment_of(place, head, block, done)
            row = rows_ref[place]  # long before it is needed
            buffer = lax.rem(j, jnp.int32(config.query_buffers))
            plgpu.barrier_wait(queries_full.at[buffer])

            def multiply(i, carry):
                out, top, total = carry
                stage = lax.rem(done + i, jnp.int32(stages))
                token = (block + i) * BLOCK
                plgpu.barrier_wait(k_full.at[stage])

                def query_key(acc):
                    plgpu.wgmma(
                        acc,
                        queries_smem.at[buffer],
                        k_smem.at[stage].transpose((1, 0)),
                    )
                    return acc[...]

                scores = pl.run_scoped(query_key, plgpu.ACC((BLOCK, BLOCK), jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                if soft_cap is None:
                    scores = scores * (sm_scale * LOG2_E)
                else:
                    scores = jnp.tanh(scores * (sm_scale / soft_cap)) * (soft_cap * LOG2_E)
                position = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1) + token
                seen = position < length
                if sliding_window is not None:
                    seen = seen & (position >= length - sliding_window)
                scores = jnp.where(seen, scores, reference.MASKED)
                new_top = jnp.maximum(top, scores.max(axis=1))
                keep = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, (0,)))
                total = total * keep + weights.sum(axis=1)
                weights = weights.astype(v_smem.dtype)
                plgpu.barrier_wait(v_full.at[stage])

                # Cache past the row's end may be NaN, which a weight of 0 does not silence.
                @pl.when(token + BLOCK > length)
                def _():
                    value_row = lax.broadcasted_iota(jnp.int32, (BLOCK, 64), 0) + token
                    for column in range(0, head_dim, 64):  # few at once, for registers' sake
                        part = v_smem.at[stage, :, pl.ds(column, 64)]
                        values = part[...]
                        part[...] = jnp.where(value_row < length, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                if weights_smem is None:
                    left = weights
                else:
                    weights_smem[...] = weights
                    plgpu.commit_smem()
                    left = weights_smem

                out = out * lax.broadcast_in_dim(keep, out.shape, (0,))

                def weight_value(acc):
                    plgpu.wgmma(acc, left, v_smem.at[stage])

                if weights_smem is None:
                    out = pl.run_state(weight_value)(plgpu.ACC.init(out))
                else:  # the interpreter can't start from what is there

                    def from_zero(acc):
                        weight_value(acc)
                        return acc[...]

                    out = out + pl.run_scoped(from_zero, plgpu.ACC((BLOCK, head_dim), jnp.float32))
                plgpu.barrier_arrive(v_free.at[stage])
                return out, new_top, total

            begun = continues & (j == 0)
            goes_on = block + todo < pl.cdiv(length, BLOCK)  # in the next worker
            top = jnp.full((BLOCK,), reference.MASKED, jnp.float32)
            total = jnp.zeros((BLOCK,), jnp.float32)
            if has_sinks:  # a sink counts once, as a key without a value before all others
                sink = plgpu.load(sinks_ref[0].at[head], optimized=False)
                top = sink + jnp.where(begun, reference.MASKED, 0.0)
                total = total + jnp.where(begun, 0.0, 1.0)
            out = jnp.zeros((BLOCK, head_dim), jnp.float32)
            out, top, total = lax.fori_loop(0, todo, multiply, (out, top, total))
            plgpu.barrier_arrive(queries_free.at[buffer])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the segment before
            out = out * lax.broadcast_in_dim(1 / total, out.shape, (0,))

            @pl.when(jnp.logical_not(begun | goes_on))
            def _():
                whole_smem[...] = out.astype(whole_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    whole_smem.at[pl.ds(0, rows)],
                    out_ref.at[row, head, pl.ds(0, rows)],
                )

            @pl.when(begun | goes_on)
            def _():
                slot = 2 * worker + jnp.where(begun, 0, 1)
                part_smem[...] = out
                plgpu.commit_smem()
                for tile, column in itertools.product(range(rows // 8), range(head_dim // LANES)):
                    plgpu.copy_smem_to_gmem(
                        part_smem.at[pl.ds(8 * tile, 8), pl.ds(column * LANES, LANES)],
                        part_ref.at[slot, tile, column],
                    )
                lse = top + jnp.log2(total)
                part_lse_ref[slot] = lax.broadcast_in_dim(lse, (BLOCK, LANES), (0,))

            return next_place, next_head, first_ref[next_place], done + todo

        lax.fori_loop(0, segments, segment, (start_place, start_head, start_block, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
