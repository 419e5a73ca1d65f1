"""Root-mean-square normalisation (arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.parameter import parameter


class RMSNorm(nnx.Module):
    """Scales the last dimension to unit mean square, then by a learnt factor; in float32 inside."""

    def __init__(self, width: int, axis: str, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.scale = parameter((width,), (axis,), dtype, mean=1.0)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * factor * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)
