"""Products of many rows with a large weight on a Hopper GPU: a Pallas Mosaic GPU kernel.

A prefill is limited by the tensor cores and, on a card that runs them all, by its power. A gated
product writes silu(gate) * up only, half of what gate and up are, which XLA writes and reads again.

A thread block a multiprocessor goes through tiles of 128 rows, 64 for each of two warpgroups, by
`block_n` outputs. Pairs of them, clusters, have the same outputs and get each other's copies of the
weight:

              round 0                round 1
    block 0   rows   0-127, tile 0   rows   0-127, tile 66
    block 1   rows 128-255, tile 0   rows 128-255, tile 66     ...

A third warpgroup sends the copies, those of the next tile while this one's sums are written.
`strip` clusters' rows are gone through for some outputs before the next outputs, so that a round
finds most of what it reads in L2.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float

from pallas_kernels.early_launch import wait_for_inputs
from pallas_kernels.kernel_names import leave_out_numbers
from pallas_kernels.matmul.config import BLOCK_ROWS, CLUSTER, CLUSTERS, Config

leave_out_numbers()

plgpu: Any = mosaic_gpu  # whose annotations call its transforms abstract and its ACC private

WARPGROUP_ROWS = 64  # of a wgmma
WARPGROUPS = BLOCK_ROWS // WARPGROUP_ROWS  # that multiply
HALVES = 2  # gate and up


# Behind a jit of its own, so that a model's layers share one lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def gated_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "N 2 K"],
    *,
    config: Config,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """silu(x gate) * (x up), in x's dtype, of a weight that holds gate and up in pairs.

    M is a multiple of 8: copies move eights, and may reach past an array's end.
    """
    num_rows, inputs = x.shape
    outputs, block_n, block_k, stages = len(weight), config.block_n, config.block_k, config.stages
    assert weight.shape == (outputs, HALVES, inputs), (x.shape, weight.shape)
    assert outputs % block_n == inputs % block_k == num_rows % 8 == 0, (x.shape, weight.shape)
    cluster = CLUSTER if interpret is None else 1  # the interpreter has none
    blocks = math.ceil(num_rows / (cluster * BLOCK_ROWS))
    if interpret is not None:
        x = jnp.pad(x, ((0, blocks * BLOCK_ROWS - num_rows), (0, 0)))
    tiles = blocks * (outputs // block_n)
    free: Any = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    if cluster > 1:
        free = plgpu.ClusterBarrier(
            collective_axes=("peer",), num_arrivals=WARPGROUPS, num_barriers=stages
        )
    x_block, weight_block = (stages, BLOCK_ROWS, block_k), (stages, HALVES * block_n, block_k)
    return plgpu.kernel(
        functools.partial(
            _block, config=config, blocks=blocks, tiles=tiles, cluster=cluster, interpret=interpret
        ),
        out_type=jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        scratch_types={
            "x_smem": plgpu.SMEM(x_block, x.dtype, transforms=_tiled(block_k, x.dtype)),
            # Gate and up one below the other are one right side: the rows are read once for both.
            "weight_smem": plgpu.SMEM(weight_block, x.dtype, transforms=_tiled(block_k, x.dtype)),
            "out_smem": plgpu.SMEM(
                (BLOCK_ROWS, block_n), x.dtype, transforms=_tiled(block_n, x.dtype)
            ),
            "full": plgpu.Barrier(num_arrivals=1 + HALVES, num_barriers=stages),
            "free": free,
        },
        grid=(min(tiles, CLUSTERS),),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="gated_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        **({"interpret": interpret} if interpret is not None else {}),
    )(x, weight)[:num_rows]


def _tiled(columns: int, dtype: Any) -> tuple[Any, Any]:
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _block(
    x_ref,
    weight_ref,
    out_ref,
    *,
    x_smem,
    weight_smem,
    out_smem,
    full,
    free,
    config,
    blocks,
    tiles,
    cluster,
    interpret,
):
    block_n, block_k, stages = config.block_n, config.block_k, config.stages
    steps = x_ref.shape[1] // block_k
    warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("cluster")
    stride = lax.axis_size("cluster")
    rounds = lax.div(tiles - first + stride - 1, jnp.int32(stride))

    def place(i):
        """First row and first output of the thread block's tile of a round."""
        shape = blocks, weight_ref.shape[0] // block_n
        row, column = plgpu.planar_snake(first + i * stride, shape, 0, config.strip)
        return (row * cluster + lax.axis_index("peer")) * BLOCK_ROWS, column * block_n

    def stage_of(step):
        return lax.rem(step, jnp.int32(stages))

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        wait_for_inputs(interpret)

        def load_tile(i, _):
            row, output = place(i)

            def load(step, _):
                stage = stage_of(i * steps + step)
                pl.when(i * steps + step >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                inputs = pl.ds(step * block_k, block_k)
                for half in range(HALVES):
                    plgpu.copy_gmem_to_smem(
                        weight_ref.at[pl.ds(output, block_n), half].at[:, inputs],
                        weight_smem.at[stage, pl.ds(half * block_n, block_n)],
                        full.at[stage],
                        collective_axes="peer" if cluster > 1 else None,
                    )
                plgpu.copy_gmem_to_smem(
                    x_ref.at[pl.ds(row, BLOCK_ROWS), inputs], x_smem.at[stage], full.at[stage]
                )
                return ()

            return lax.fori_loop(0, steps, load, ())

        lax.fori_loop(0, rounds, load_tile, ())

        # Leave only when all that was sent has been consumed.
        def drain(step, _):
            plgpu.barrier_wait(free.at[stage_of(step)])
            return ()

        sent = rounds * steps
        lax.fori_loop(jnp.maximum(sent - stages, 0), sent, drain, ())

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def multiply_tile(i, _):
            def products(acc):
                def multiply(step, _):
                    stage = stage_of(i * steps + step)
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wgmma(
                        acc, x_smem.at[stage, rows], weight_smem.at[stage].transpose((1, 0))
                    )
                    plgpu.wgmma_wait(1)

                    @pl.when(step > 0)  # the copies before have been read
                    def _():
                        plgpu.barrier_arrive(free.at[stage_of(i * steps + step - 1)])

                    return ()

                lax.fori_loop(0, steps, multiply, ())
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[stage_of((i + 1) * steps - 1)])
                return acc[...]

            sums = pl.run_scoped(
                products, plgpu.ACC((WARPGROUP_ROWS, HALVES * block_n), jnp.float32)
            )
            gate, up = sums[:, :block_n], sums[:, block_n:]
            out = gate * (1 / (1 + jnp.exp(-gate))) * up
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before
            out_smem[rows] = out.astype(out_smem.dtype)
            plgpu.commit_smem()
            row, output = place(i)
            plgpu.copy_smem_to_gmem(
                out_smem.at[rows],
                out_ref.at[
                    pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), pl.ds(output, block_n)
                ],
            )
            return ()

        lax.fori_loop(0, rounds, multiply_tile, ())
        plgpu.wait_smem_to_gmem(0)
