"""Products with a weight: the one place that knows how each platform likes them written."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sharding.place import Placement

# With more rows both ways to write a product are equally fast on the CPU, and the transpose costs.
_MAX_WEIGHT_FIRST_ROWS = 128


def linear(
    x: Float[Array, "T inputs"],
    weight: Float[Array, "*outputs inputs"],
    placement: Placement,
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "T *outputs"]:
    """x times the weight, which is stored outputs first, as checkpoints have it.

    Of several output dimensions only the first may be split over devices: they are multiplied as
    one (given more, XLA may copy the whole weight to reorder them). On the CPU few rows are
    multiplied with the weight as left operand, which takes 0.5 to 0.8 of the time at 2 to 64 rows
    (a SmolLM2-135M step in float32, JAX 0.11.2); the barrier keeps XLA from turning the product
    around again.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    if placement.on_cpu and x.shape[0] <= _MAX_WEIGHT_FIRST_ROWS:
        product = jnp.einsum("OI,TI->OT", matrix, x, preferred_element_type=out_dtype)
        product = jax.lax.optimization_barrier(product).T
    else:
        product = jnp.einsum("TI,OI->TO", x, matrix, preferred_element_type=out_dtype)
    return product.reshape(-1, *weight.shape[:-1])
