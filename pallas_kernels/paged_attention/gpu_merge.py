"""Partial results of the GPU decode kernel, weighed into one (split-KV, arXiv:2311.01282).

Of a task in parts, whoever writes the last part merges them all. Parts are counted in the plan,
which is the kernel's input; the last sets the count back, so that every layer finds it 0. Nobody
waits for anybody, so workers need not all be resident. Pallas's interpreter can't count: there a
second kernel merges.

    slot of a part   2 w + 1: of the worker that began the task    2 w: of one that went on with it
    part             out [tile of 8 rows, columns / LANES, 8, LANES], divided by its sum of weights
    lse              [row, LANES], each lane alike: maximum + log of the sum, in units of log 2
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.paged_attention import reference

plgpu: Any = mosaic_gpu
mgpu: Any = mosaic

LANES = 32  # columns of a part that lie together
LOADS_AT_ONCE = 32  # of [8, LANES], that are waited for all together


def merge_kernel(part_ref, lse_ref, splits_ref, out_ref):
    """A kernel that merges 8 rows of the task that each worker began and others went on with."""
    worker, tile = lax.axis_index("worker"), lax.axis_index("tile")

    def scoped(out_smem):
        pl.when(splits_ref[worker, 2] > 0)(
            lambda: merge(worker, tile, part_ref, lse_ref, splits_ref, out_ref, out_smem)
        )

    pl.run_scoped(scoped, plgpu.SMEM(part_ref.shape[2:], out_ref.dtype))


def merge(worker, tile, part_ref, lse_ref, splits_ref, out_ref, out_smem):
    """Weighs 8 rows of the parts of the task that `worker` began, and writes them."""
    _, _, columns, rows, lanes = part_ref.shape
    row, head, parts = (splits_ref[worker, i] for i in range(3))
    at_once = max(1, LOADS_AT_ONCE // columns)

    def step(i, state):
        top, total, *outs = state
        lses, values = [], []
        for j in range(at_once):
            part = jnp.minimum(i * at_once + j, parts - 1)
            slot = 2 * (worker + part) + jnp.where(part == 0, 1, 0)
            surplus = jnp.where(i * at_once + j < parts, 0.0, reference.MASKED)
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
        pl.cdiv(parts, at_once),
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
