"""The gated feed-forward layer (SwiGLU, arXiv:2002.05202)."""

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
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

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = linear(x, self.gate_up.get_value(), self.placement)
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias.get_value()
        gate_up = self.placement.constrain(gate_up, ("tokens", "mlp", None))
        x = jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]
        x = linear(x, self.down.get_value(), self.placement)
        x = self.placement.constrain(x, ("tokens", "embed"))
        return x if self.down_bias is None else x + self.down_bias.get_value()
