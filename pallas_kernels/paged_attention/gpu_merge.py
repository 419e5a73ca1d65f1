"""Partial results of the GPU decode kernel, weighed into one (split-KV, arXiv:2311.01282).

Of a task in parts, whoever writes the last part merges them all. Parts are counted in the plan,
which is the kernel's input; the last sets the count back, so that every layer finds it 0. Nobody
waits for anybody, so workers need not all be resident. Pallas's interpreter can't count: there a
second kernel merges.

    slot of a part   2 w + 1: of the worker that began the task    2 w: of one that went on with it
    part             out [head's width, queries], divided by its sum of weights
    lse              [queries]: maximum + log of the sum, in units of log 2
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.gpu_plan import Column

plgpu: Any = mosaic_gpu
mgpu: Any = mosaic

COLUMNS = 64  # that lie together in shared memory, swizzled over 128 bytes
TILED = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
TILE = 8  # queries that are merged together
ELEMENTS_AT_ONCE = 4 << 10  # of parts, that are waited for all together


def padded_width(head_dim: int) -> int:
    """Columns of a head in shared memory, in whole tiles."""
    return COLUMNS * math.ceil(head_dim / COLUMNS)


def write_columns(out, smem) -> None:
    """Columns of an output as rows of shared memory, for copies."""
    smem.transpose((1, 0))[...] = out.astype(smem.dtype)
    plgpu.commit_smem()


def merge_kernel(part_ref, lse_ref, plan_ref, out_ref):
    """A kernel that merges TILE queries of the task that each worker began and others went on
    with."""
    worker, tile = lax.axis_index("worker"), lax.axis_index("tile")

    def scoped(out_smem):
        pl.when(plan_ref[worker, Column.PARTS] > 0)(
            lambda: merge(worker, tile, part_ref, lse_ref, plan_ref, out_ref, out_smem)
        )

    _, width, columns = part_ref.shape
    pl.run_scoped(scoped, plgpu.SMEM((columns, width), out_ref.dtype, transforms=TILED))


def merge(worker, tile, part_ref, lse_ref, plan_ref, out_ref, out_smem):
    """Weighs TILE queries of the parts of the task that `worker` began, and writes them."""
    _, width, _ = part_ref.shape
    queries = pl.ds(tile * TILE, TILE)
    split = Column.SPLIT_ROW, Column.SPLIT_HEAD, Column.PARTS
    row, head, parts = (plan_ref[worker, column] for column in split)
    at_once = max(1, ELEMENTS_AT_ONCE // (width * TILE))
    load = functools.partial(plgpu.load, optimized=False)

    def over_queries(x):
        return lax.broadcast_in_dim(x, (width, TILE), (1,))

    def step(i, state):
        top, total, out = state
        lses, values = [], []
        for j in range(at_once):
            part = jnp.minimum(i * at_once + j, parts - 1)
            slot = 2 * (worker + part) + jnp.where(part == 0, 1, 0)
            surplus = jnp.where(i * at_once + j < parts, 0.0, reference.MASKED)
            lses.append(load(lse_ref.at[slot, queries]) + surplus)
            values.append(load(part_ref.at[slot, :, queries]))
        new_top = functools.reduce(jnp.maximum, lses, top)
        keep = jnp.exp2(top - new_top)
        weights = [jnp.exp2(lse - new_top) for lse in lses]
        total = sum(weights, total * keep)
        out = sum(
            (over_queries(w) * v for w, v in zip(weights, values, strict=True)),
            out * over_queries(keep),
        )
        return new_top, total, out

    _, total, out = lax.fori_loop(
        0,
        pl.cdiv(parts, at_once),
        step,
        (
            jnp.full((TILE,), reference.MASKED, jnp.float32),
            jnp.zeros((TILE,), jnp.float32),
            jnp.zeros((width, TILE), jnp.float32),
        ),
    )
    out_smem = out_smem.at[queries]
    write_columns(out * over_queries(1 / total), out_smem)
    plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, queries])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def arrive_last(count_ref, smem, parts):
    """Whether this warpgroup is the last of `parts` to come here; then sets the count back to 0.

    What each wrote before, and has waited for, can be read by the last.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def arrive(_, count_ref, smem, parts):
        parts = parts.registers.item()
        count, word = mgpu.utils.memref_ptr(count_ref), mgpu.utils.memref_ptr(smem)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(
                "{ .reg .u32 seen, last; .reg .pred is_last;"
                " fence.acq_rel.gpu;"
                " atom.acq_rel.gpu.global.add.u32 seen, [$0], 1;"
                " add.u32 seen, seen, 1;"
                " setp.eq.u32 is_last, seen, $2;"
                " @is_last st.relaxed.gpu.global.u32 [$0], 0;"
                " selp.u32 last, 1, 0, is_last;"
                " st.shared.u32 [$1], last; }",
                count,
                word,
                parts,
                has_side_effects=True,
            )
        mgpu.utils.warpgroup_barrier()
        last = mgpu.utils.inline_ptx(
            "ld.volatile.shared.u32 $0, [$1];", word, result_types=parts.type, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    return arrive(count_ref, smem, parts) != 0
