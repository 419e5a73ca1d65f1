"""Root-mean-square normalisation (arXiv:1910.07467), and the residual stream that it reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.parameter import parameter


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("scaled", "squares"), meta_fields=("eps",)
)
@dataclasses.dataclass(frozen=True)
class HalfNormed:
    """A norm whose rows are still to be divided by their root mean squares: a product of few rows
    on a GPU does so to its sums."""

    scaled: Float[Array, "T D"]
    squares: Float[Array, "padded_T blocks"]
    """Of the residual stream: a row's add up to its sum of squares."""
    eps: float

    @property
    def dtype(self) -> jnp.dtype:
        return self.scaled.dtype

    def whole(self) -> Float[Array, "T D"]:
        num_tokens, width = self.scaled.shape
        squares = jnp.sum(self.squares[:num_tokens], axis=1, keepdims=True)
        factor = jax.lax.rsqrt(squares / width + self.eps)
        return (self.scaled.astype(jnp.float32) * factor).astype(self.scaled.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual stream, and what a layer has to add to it: the next norm does, in passing."""

    hidden: Float[Array, "T D"]
    addend: Float[Array, "T D"] | Float[Array, "S T D"] | None = None
    """Of three dimensions: parts whose sum is meant (see `linear.add_linear`)."""
    normed: HalfNormed | None = None
    """What the next norm makes of `hidden`, where a kernel has done it."""

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

    def of_sum(self, stream: Residual) -> tuple[Residual, Float[Array, "T D"] | HalfNormed]:
        """The stream with its addend added, and its norm."""
        if stream.normed is not None:
            return Residual(stream.hidden), stream.normed
        parts = stream.addend
        if parts is not None and parts.ndim == 3:  # only kernels of GPUs bring such
            from pallas_kernels.add_norm import gpu

            if gpu.unsupported(parts.shape[-1]) is None:
                scale = self.scale.get_value()
                hidden, x = gpu.add_norm(stream.hidden, parts, scale, eps=self.eps)
                return Residual(hidden), x
        hidden = stream.sum()
        return Residual(hidden), self(hidden)
