"""Residual addition and RMSNorm on a GPU: a Pallas Mosaic GPU kernel.

XLA makes two or three kernels of it, which for a decode step's few rows cost more in starting than
in reading, and read a prefill's twice. Here a warpgroup has a row: it adds up the parts of the
product before (see `decode_matmul`), adds the row of the residual stream, and holds it in registers
between the sum of squares and the scaling.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float

from pallas_kernels.early_launch import allow_next, wait_for_inputs
from pallas_kernels.kernel_names import leave_out_numbers

leave_out_numbers()

plgpu: Any = mosaic_gpu

LANES = 128  # threads of a warpgroup


def unsupported(width: int) -> str | None:
    """Why the kernel can't do a width, or None where it can."""
    if width % (4 * LANES) or width > 64 * LANES:
        return f"width {width} (multiples of {4 * LANES} up to {64 * LANES} work)"
    return None


# Behind a jit of its own, so that a model's layers share one lowered kernel.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    hidden: Float[Array, "T D"],
    parts: Float[Array, "S T D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """hidden + sum(parts), and its RMSNorm, both in hidden's dtype."""
    row = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    return plgpu.kernel(
        functools.partial(_row, eps=eps, interpret=interpret),
        out_type=[row, row],
        grid=(len(hidden),),
        grid_names=("row",),
        kernel_name="add_norm",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        **({"interpret": interpret} if interpret is not None else {}),
    )(hidden, parts, scale)


def _row(hidden_ref, parts_ref, scale_ref, sum_ref, normed_ref, *, eps, interpret):
    allow_next(interpret)
    wait_for_inputs(interpret)
    row = lax.axis_index("row")
    x = hidden_ref[row].astype(jnp.float32)
    for part in range(parts_ref.shape[0]):
        x = x + parts_ref[part, row].astype(jnp.float32)
    rounded = x.astype(sum_ref.dtype)
    sum_ref[row] = rounded
    x = rounded.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(x * x) / x.shape[0] + eps)
    normed_ref[row] = (x * factor * scale_ref[...].astype(jnp.float32)).astype(normed_ref.dtype)
