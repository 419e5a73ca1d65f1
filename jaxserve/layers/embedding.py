"""Token ids to vectors, and vectors to logits over the vocabulary."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import linear
from sharding.place import Placement


def embed(token_ids: Int[Array, " T"], table: Float[Array, "V D"]) -> Float[Array, "T D"]:
    """Rows of the table. Ids must be within the vocabulary; others are clamped."""
    return table.at[token_ids].get(mode="clip")


def logits(
    x: Float[Array, "R D"], head: Float[Array, "stored D"], vocab_size: int, placement: Placement
) -> Float[Array, "R V"]:
    """Logits over the true vocabulary, float32; rows of the head that only pad it are left out."""
    return linear(x, head, placement, out_dtype=jnp.float32)[:, :vocab_size]
