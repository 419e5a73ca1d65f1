"""From logits to tokens, on the device, without sorting the vocabulary.

The order: token mask, temperature, top-k, top-p of what top-k kept, min-p, draw. Each filter finds
the smallest logit it keeps by bisection over the bits of a float32 (32 passes of compare and sum),
so ties with that logit are all kept. The draw inverts the cumulative distribution at one uniform
number made from (seed, position), so a sample doesn't depend on the batch it ran in, nor on the
other rows. Greedy rows (temperature 0) take the largest logit after the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.execution.buckets import SampleKind
from jaxserve.types import MAX_LOGPROBS

DRAW_BLOCK = 256
NOT_A_NUMBER = -2
"""In place of a token; -1 is step.TOKEN_ON_DEVICE."""


class Sampled(NamedTuple):
    """What a sampling step brings; the log-probabilities are empty unless the step is of kind
    FULL."""

    tokens: Int[Array, " R"]
    """NOT_A_NUMBER where the row's logits are NaN."""
    logprobs: Float[Array, "R _"]
    """Of the sampled token, under the model's own distribution (no mask, temperature or filter)."""
    top_ids: Int[Array, "R _"]
    top_logprobs: Float[Array, "R _"]


def sample(
    logits: Float[Array, "R V"],
    packed: Int[Array, "F R"],
    mask: UInt32[Array, "R W"] | None,
    kind: SampleKind,
) -> Sampled:
    """One token a row. `packed` and `mask` are step.pack_sampling's; the mask comes with kind FULL
    only, for the others it has been applied to the logits."""
    R = logits.shape[0]
    raw = logits.astype(jnp.float32)
    none = jnp.zeros((R, 0), jnp.float32)
    if kind == SampleKind.GREEDY:
        return Sampled(_numbers(greedy(raw), raw), none, none.astype(jnp.int32), none)
    _, seed_low, seed_high, position, top_k = packed[:5]
    temperature, top_p, min_p = lax.bitcast_convert_type(packed[5:], jnp.float32)
    allowed = raw if mask is None else apply_mask(raw, mask)
    scaled = allowed / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    if kind >= SampleKind.FILTERED:
        scaled = keep_top_k(scaled, top_k)
        scaled = keep_top_p(scaled, top_p)
        scaled = keep_min_p(scaled, min_p)
    drawn = draw(scaled, uniform(seed_low, seed_high, position))
    tokens = _numbers(jnp.where(temperature > 0, drawn, greedy(allowed)), raw)
    if kind < SampleKind.FULL:
        return Sampled(tokens, none, none.astype(jnp.int32), none)
    logprobs = jax.nn.log_softmax(raw, axis=-1)
    top_logprobs, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[-1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    return Sampled(tokens, chosen, top_ids.astype(jnp.int32), top_logprobs)


def _numbers(tokens: Int[Array, " R"], logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The tokens, or NOT_A_NUMBER where the row's largest logit is NaN, as it is if any is."""
    return jnp.where(jnp.isnan(jnp.max(logits, axis=-1)), NOT_A_NUMBER, tokens)


def greedy(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def apply_mask(logits: Float[Array, "R V"], mask: UInt32[Array, "R W"]) -> Float[Array, "R V"]:
    """Logits of tokens whose bit is 0 become -inf."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def keep_top_k(logits: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, "R V"]:
    """Keeps the `top_k` largest of each row (0: all), and all that tie with the last of them."""
    V = logits.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    return _keep(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)


def keep_top_p(logits: Float[Array, "R V"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Keeps the fewest likeliest tokens whose probability is at least `top_p`, and ties with the
    last. 1: all."""
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    target = jnp.where(top_p < 1, top_p * jnp.sum(weights, axis=-1), jnp.inf)
    return _keep(logits, lambda kept: jnp.sum(jnp.where(kept, weights, 0), axis=-1) >= target)


def keep_min_p(logits: Float[Array, "R V"], min_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Drops tokens less likely than `min_p` times the likeliest."""
    least = jnp.max(logits, axis=-1) + jnp.log(min_p)  # log(0) is -inf, which keeps all
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def _keep(logits, enough) -> Float[Array, "R V"]:
    """Drops logits under the largest bound for which `enough(logits >= bound)` holds; keeps all
    where none does."""
    order = _sortable(logits)

    def halve(bit, bound):
        trial = bound | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        return jnp.where(enough(order >= trial[:, None]), trial, bound)

    bound = lax.fori_loop(0, 32, halve, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(order >= bound[:, None], logits, -jnp.inf)


def _sortable(x: Float[Array, "R V"]) -> UInt32[Array, "R V"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def uniform(
    seed_low: Int[Array, " R"], seed_high: Int[Array, " R"], position: Int[Array, " R"]
) -> Float[Array, " R"]:
    """A number in [0, 1) for each row, from its seed and the position of the token it draws, and
    nothing else."""

    def one(low, high, at):
        words = jnp.stack([high, low]).astype(jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, at))

    return jax.vmap(one)(seed_low, seed_high, position)


def draw(logits: Float[Array, "R V"], u: Float[Array, " R"]) -> Int[Array, " R"]:
    """The token at which the cumulative probability passes `u`; never one whose logit is -inf.

    Two levels (sums of blocks of 256, then within one block) keep the cost near one pass over the
    vocabulary.
    """
    R, V = logits.shape
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.pad(weights, ((0, 0), (0, -V % DRAW_BLOCK)))
    blocks = weights.reshape(R, -1, DRAW_BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    goal = u * jnp.sum(sums, axis=-1)
    block, before = _first_past(sums, goal)
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    within, _ = _first_past(chosen, goal - before)
    return (block * DRAW_BLOCK + within).astype(jnp.int32)


def _first_past(
    weights: Float[Array, "R B"], goal: Float[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """First index of positive weight where the running sum exceeds `goal`, and the running sum
    ahead of it.

    Where rounding leaves none: the last index of positive weight.
    """
    B = weights.shape[-1]
    running = jnp.cumsum(weights, axis=-1)
    is_past = (running > goal[:, None]) & (weights > 0)
    last = B - 1 - jnp.argmax(jnp.flip(weights > 0, axis=-1), axis=-1)
    index = jnp.where(jnp.any(is_past, axis=-1), jnp.argmax(is_past, axis=-1), last)
    ahead = jnp.take_along_axis(running - weights, index[:, None], axis=-1)[:, 0]
    return index, ahead
