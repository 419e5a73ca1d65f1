"""Products of few rows with a large weight on a Hopper GPU: Pallas Mosaic GPU kernels.

A decode step multiplies few rows with every weight, so a product of up to 128 should take the time
in which its weight is read and little else. Each thread block owns a tile of outputs and a share of
the inputs, in one wave over the card, with a ring of copies in shared memory deep enough to keep
memory busy; the weight is read once, the rows once a block (out of L2):

                inputs K
              +----+----+----+----+
    outputs   | 0  | 1  | 2  | 3  |   `splits` shares of the inputs (split-K): their sums come out
    N         +----+----+----+----+   as float32 parts that whoever reads them adds, since what
              | 4  | 5  | 6  | 7  |   follows a product reads it all anyway (a norm, rotary
              +----+----+----+----+   positions, a residual)

Rows are the left side of a wgmma, 64 a warpgroup, 128 a thread block at most. More are two blocks'
of a cluster, which get each other's weights, too. What the rows past the last one hold is never
written. Weights lie as checkpoints have them, outputs first.

A product that isn't split can also do what else stands between it and the next: `decode_matmul_add`
adds the residual stream and leaves the next RMSNorm half done. Its scale is in the rows already;
the factor of a row, which needs the whole row, is applied by the next product to its sums, from
the squares that each block has added up:

    norm(h) W = (h scale) W / rms(h)

The first weights are read while the kernel ahead still runs (see `early_launch`).
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

from pallas_kernels.decode_matmul.config import Config
from pallas_kernels.early_launch import allow_next, wait_for_inputs
from pallas_kernels.kernel_names import leave_out_numbers

leave_out_numbers()

plgpu: Any = mosaic_gpu  # whose annotations call its transforms abstract and its ACC private

BLOCK_M = 64  # rows of a wgmma
AHEAD = 8  # copies of weights that are sent before the kernel ahead has ended
LAST = 4  # copies that are still to be sent when the next kernel may start


# Behind a jit of its own, so that a model's layers share one lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "gated", "eps", "interpret"))
def decode_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "*halves N K"],
    squares: Float[Array, "padded_M blocks"] | None = None,
    *,
    config: Config,
    gated: bool = False,
    eps: float = 0.0,
    interpret: Any = None,
) -> Float[Array, "..."]:
    """x times the weight's transpose: float32 parts [splits, M, N] whose sum it is.

    gated: the weight is [N, 2, K], and the result silu(x gate) * (x up), [M, N] in x's dtype.
    squares, eps: as `decode_matmul_add` left them with x, whose rows are still to be divided by
    their root mean square.
    """
    assert not gated or config.splits == 1
    out, *_ = _call(x, weight, squares, None, None, config, gated, eps, interpret)
    return out[..., : len(x), :]


# Behind a jit of its own, so that a model's layers share one lowered kernel.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def decode_matmul_add(
    x: Float[Array, "M K"],
    weight: Float[Array, "N K"],
    hidden: Float[Array, "M N"],
    scale: Float[Array, " N"],
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[Float[Array, "M N"], Float[Array, "M N"], Float[Array, "padded_M blocks"]]:
    """hidden + x times the weight's transpose, the same times `scale`, both in x's dtype, and the
    sums of each block's squares of the first, whose total is that of a row."""
    assert config.splits == 1
    total, scaled, squares = _call(x, weight, None, hidden, scale, config, False, 0.0, interpret)
    return total[: len(x)], scaled[: len(x)], squares


def _call(x, weight, squares, hidden, scale, config, gated, eps, interpret):
    num_rows, inputs = x.shape
    outputs, halves = weight.shape[0], 2 if gated else 1
    assert weight.shape[-1] == inputs, (x.shape, weight.shape)
    assert inputs % config.block_k == 0, (inputs, config)
    assert outputs % config.block_n == 0, (outputs, config)
    adds = hidden is not None
    warpgroups = 1 if num_rows <= BLOCK_M else 2
    rows = BLOCK_M * warpgroups  # of a thread block
    row_blocks = math.ceil(num_rows / rows)
    assert row_blocks <= 2, num_rows
    out_dtype = x.dtype if gated or adds else jnp.float32
    stages = config.num_stages(rows, halves, adds=adds)
    assert stages >= 2, config
    # Copies move 8 rows at least; they may reach past an array's end, though not interpreted.
    copied = min(rows, 8 * math.ceil(num_rows / 8))
    if interpret is not None:
        padding = (0, row_blocks * copied - num_rows), (0, 0)
        x, hidden = jnp.pad(x, padding), jnp.pad(hidden, padding) if adds else None
    swizzle = plgpu.find_swizzle(config.block_n * jnp.dtype(out_dtype).itemsize * 8)
    lanes = swizzle // jnp.dtype(out_dtype).itemsize
    tiled = _tiled(min(128, config.block_k * 2), 2)
    whole = jax.ShapeDtypeStruct((len(x), outputs), out_dtype)
    if adds:
        blocks = outputs // config.block_n
        squares_type = jax.ShapeDtypeStruct((row_blocks * rows, blocks), jnp.float32)
        out_type = [whole, whole, squares_type]
    elif gated:
        out_type = [whole]
    else:
        out_type = [jax.ShapeDtypeStruct((config.splits, *whole.shape), out_dtype)]
    free: Any = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    grid, grid_names, cluster = (config.splits, outputs // config.block_n), ("split", "tile"), {}
    is_cluster = row_blocks > 1 and interpret is None  # which has none
    if is_cluster:
        cluster = {"cluster": (row_blocks,), "cluster_names": ("row_block",)}
        free = plgpu.ClusterBarrier(
            collective_axes=("row_block",), num_arrivals=warpgroups, num_barriers=stages
        )
    else:
        grid, grid_names = (row_blocks, *grid), ("row_block", *grid_names)
    x_smem = plgpu.SMEM((stages, rows, config.block_k), x.dtype, transforms=tiled)
    # Gate and up one below the other are one right side: the rows are read once for both.
    weight_smem = plgpu.SMEM(
        (stages, halves * config.block_n, config.block_k), x.dtype, transforms=tiled
    )
    out_smem = plgpu.SMEM(
        (rows, config.block_n),
        out_dtype,
        transforms=(plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(swizzle)),
    )
    scratch = {
        "smem": plgpu.RefUnion([x_smem, weight_smem], [out_smem] * (1 + adds)),
        "hidden_smem": out_smem if adds else None,
        "hidden_full": plgpu.Barrier() if adds else None,
        "full": plgpu.Barrier(num_arrivals=1 + halves, num_barriers=stages),
        "free": free,
        "done": plgpu.Barrier(num_arrivals=warpgroups),
    }
    inputs = [x, weight, squares, hidden, scale]
    names = [
        name
        for name, array in zip(("squares", "hidden", "scale"), inputs[2:], strict=True)
        if array is not None
    ]
    name = "decode_matmul_add" if adds else "decode_matmul_gated" if gated else "decode_matmul"
    return plgpu.kernel(
        functools.partial(
            _block,
            names=names,
            eps=eps,
            copied=copied,
            is_cluster=is_cluster,
            warpgroups=warpgroups,
            config=config,
            interpret=interpret,
        ),
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=grid_names,
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        **cluster,
        **({"interpret": interpret} if interpret is not None else {}),
    )(*(array for array in inputs if array is not None))


def _tiled(swizzle: int, itemsize: int) -> tuple[Any, Any]:
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _block(
    x_ref,
    weight_ref,
    *refs,
    smem,
    hidden_smem,
    hidden_full,
    full,
    free,
    done,
    names,
    eps,
    copied,
    is_cluster,
    warpgroups,
    config,
    interpret,
):
    (x_smem, weight_smem), out_smems = smem
    more, out_refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    split, tile = lax.axis_index("split"), lax.axis_index("tile")
    halves = weight_smem.shape[1] // config.block_n
    first_row = lax.axis_index("row_block") * x_smem.shape[1]
    warpgroup = lax.axis_index("warpgroup")
    stages, block_n, block_k = full.shape[0], config.block_n, config.block_k
    num_blocks = weight_ref.shape[-1] // block_k
    first = lax.div(split * num_blocks, jnp.int32(config.splits))
    count = lax.div((split + 1) * num_blocks, jnp.int32(config.splits)) - first
    first_out = tile * block_n

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def stage_of(i):
            return lax.rem(i, jnp.int32(stages)), pl.ds((first + i) * block_k, block_k)

        def load_weight(i, _):
            stage, inputs = stage_of(i)
            outputs = pl.ds(first_out, block_n)
            for half in range(halves):
                source = weight_ref.at[outputs] if halves == 1 else weight_ref.at[outputs, half]
                plgpu.copy_gmem_to_smem(
                    source.at[:, inputs],
                    weight_smem.at[stage, pl.ds(half * block_n, block_n)],
                    full.at[stage],
                    collective_axes="row_block" if is_cluster else None,
                )
            return ()

        def load_rows(i, _):
            stage, inputs = stage_of(i)
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(first_row, copied), inputs],
                x_smem.at[stage, pl.ds(0, copied)],
                full.at[stage],
            )
            return ()

        def load_both(i, _):
            load_weight(i, ())
            return load_rows(i, ())

        def load(i, _):
            plgpu.barrier_wait(free.at[stage_of(i)[0]])
            return load_both(i, ())

        # The first weights don't wait for the rows to be there.
        room = jnp.minimum(count, stages)
        ahead = jnp.minimum(count, min(stages, AHEAD))
        lax.fori_loop(0, ahead, load_weight, ())
        wait_for_inputs(interpret)
        lax.fori_loop(0, ahead, load_rows, ())
        if hidden_smem is not None:
            plgpu.copy_gmem_to_smem(
                more["hidden"].at[pl.ds(first_row, copied), pl.ds(first_out, block_n)],
                hidden_smem.at[pl.ds(0, copied)],
                hidden_full,
            )
        lax.fori_loop(ahead, room, load_both, ())
        # The next kernel's first weights are not to hold up this one's, but to follow the last.
        last = jnp.maximum(count - LAST, room)
        lax.fori_loop(room, last, load, ())
        allow_next(interpret)
        lax.fori_loop(last, count, load, ())

        # Leave only when all that was sent has been consumed.
        def drain(i, _):
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])
            return ()

        lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, ())

    @pl.when(warpgroup < warpgroups)
    def _():
        registers = 232 if warpgroups == 2 else 240
        plgpu.set_max_registers(registers, action="increase")
        first = warpgroup * BLOCK_M
        rows, out_rows = (pl.ds(start, BLOCK_M) for start in (first, first_row + first))
        outputs = pl.ds(first_out, block_n)
        factor = None
        if "squares" in more:
            wait_for_inputs(interpret)
            squares = plgpu.load(more["squares"].at[out_rows], optimized=False)
            factor = lax.rsqrt(squares.sum(axis=1) / x_ref.shape[1] + eps)

        def products(acc):
            def multiply(i, _):
                stage = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[stage])
                weights = weight_smem.at[stage].transpose((1, 0))
                plgpu.wgmma(acc, x_smem.at[stage, rows], weights)
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)  # the block before has been read
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(i - 1, jnp.int32(stages))])

                return ()

            lax.fori_loop(0, count, multiply, ())
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(count - 1, jnp.int32(stages))])
            return acc[...]

        out = pl.run_scoped(products, plgpu.ACC((BLOCK_M, halves * block_n), jnp.float32))
        if factor is not None:
            out = out * lax.broadcast_in_dim(factor, out.shape, (0,))
        if halves == 2:
            gate, up = out[:, :block_n], out[:, block_n:]
            out = gate * (1 / (1 + jnp.exp(-gate))) * up
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)  # nobody reads the ring any more, whose memory this is
        outs = [out]
        if hidden_smem is not None:
            plgpu.barrier_wait(hidden_full)
            total = out + hidden_smem[rows].astype(jnp.float32)
            total = total.astype(x_ref.dtype).astype(jnp.float32)  # as the residual stream has it
            out_refs[2][out_rows, tile] = (total * total).sum(axis=1)
            scale = plgpu.load(more["scale"].at[outputs], optimized=False).astype(jnp.float32)
            outs = [total, total * lax.broadcast_in_dim(scale, total.shape, (1,))]
        for out, out_smem in zip(outs, out_smems, strict=True):
            out_smem[rows] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        written = min(BLOCK_M, copied)
        for out_ref, out_smem in zip(out_refs, out_smems, strict=False):
            out_ref = out_ref if len(out_ref.shape) == 2 else out_ref.at[split]
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(first, written)],
                out_ref.at[pl.ds(first_row + first, written), outputs],
            )
        plgpu.wait_smem_to_gmem(0)
