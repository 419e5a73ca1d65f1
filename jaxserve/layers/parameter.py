"""How a layer declares a parameter: shape, logical axes, what a random one looks like."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sharding.place import Axes, Distribution


def parameter(
    shape: tuple[int, ...],
    axes: Axes,
    dtype: DTypeLike,
    *,
    fan_in: int | None = None,
    mean: float = 0.0,
) -> nnx.Param:
    """A parameter full of `mean`: models are built abstractly, their values come later.

    fan_in: how many products are summed into one output, so that random values keep the scale of
      what goes in; without it they are all `mean`.
    """
    assert len(shape) == len(axes), (shape, axes)
    distribution = Distribution(mean, 0.0 if fan_in is None else fan_in**-0.5)
    return nnx.Param(jnp.full(shape, mean, dtype), axes=axes, distribution=distribution)
