"""The gated feed-forward layer (SwiGLU, arXiv:2002.05202)."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.linear import add_linear, gated_linear
from jaxserve.layers.norm import HalfNormed, Residual
from jaxserve.layers.parameter import parameter
from sharding.place import Placement


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one weight.

    gate_up [F, 2, D], gate first, so that splitting F over devices keeps pairs; down [D, F].
    """

    def __init__(
        self, width: int, mlp_width: int, *, bias: bool, placement: Placement, dtype: DTypeLike
    ):
        self.placement = placement
        self.gate_up = parameter((mlp_width, 2, width), ("mlp", None, "embed"), dtype, fan_in=width)
        self.down = parameter((width, mlp_width), ("embed", "mlp"), dtype, fan_in=mlp_width)
        self.gate_up_bias = (
            parameter((mlp_width, 2), ("mlp", None), dtype, fan_in=width) if bias else None
        )
        self.down_bias = parameter((width,), ("embed",), dtype, fan_in=mlp_width) if bias else None

    def __call__(self, stream: Residual, x: Float[Array, "T D"] | HalfNormed) -> Residual:
        """The stream with what comes of its norm `x` to add."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias.get_value()
        x = gated_linear(x, self.gate_up.get_value(), self.placement, bias=bias)
        return add_linear(stream, x, self.down.get_value(), self.placement, self.down_bias)
