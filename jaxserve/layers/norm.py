"""Root-mean-square normalisation (arXiv:1910.07467), and the residual stream that it reads."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.parameter import parameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual stream, and what a layer has to add to it: the next norm does, in passing."""

    hidden: Float[Array, "T D"]
    addend: Float[Array, "T D"] | Float[Array, "S T D"] | None = None
    """Of three dimensions: parts whose sum is meant (see `linear_to_add`)."""

    def plus(self, addend: Float[Array, "..."]) -> "Residual":
        assert self.addend is None
        return Residual(self.hidden, addend)

    def sum(self) -> Float[Array, "T D"]:
        if self.addend is None:
            return self.hidden
        addend = self.addend
        if addend.ndim == 3:
            addend = jnp.sum(addend, axis=0).astype(self.hidden.dtype)
        return self.hidden + addend


class RMSNorm(nnx.Module):
    """Scales the last dimension to unit mean square, then by a learnt factor; in float32 inside."""

    def __init__(self, width: int, axis: str, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.scale = parameter((width,), (axis,), dtype, mean=1.0)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * factor * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)

    def of_sum(self, stream: Residual) -> tuple[Residual, Float[Array, "T D"]]:
        """The stream with its addend added, and its norm."""
        parts = stream.addend
        if parts is not None and parts.ndim == 3:  # only kernels of GPUs bring such
            from pallas_kernels.add_norm import gpu

            if gpu.unsupported(parts.shape[-1]) is None:
                scale = self.scale.get_value()
                hidden, x = gpu.add_norm(stream.hidden, parts, scale, eps=self.eps)
                return Residual(hidden), x
        hidden = stream.sum()
        return Residual(hidden), self(hidden)
