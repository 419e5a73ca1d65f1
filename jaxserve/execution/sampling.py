"""From logits to tokens, on the device, without sorting the vocabulary.

The order: padding of the vocabulary, token mask, logit bias, repetition, frequency and presence
penalty, temperature, top-k, top-p of what top-k kept, min-p, typical-p, draw. Each filter finds the
smallest value it keeps by bisection over the bits of a float32 (32 passes of compare and sum), so
ties with that value are all kept. The draw inverts the cumulative distribution at one uniform
number made from (seed, position), so a sample doesn't depend on the batch it ran in, nor on the
other rows. Greedy rows (temperature 0) take the largest logit after the penalties.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.buckets import SampleKind
from jaxserve.execution.slot_state import SlotState, count_sampled
from jaxserve.execution.step import RowOptions
from jaxserve.types import MAX_LOGPROBS

DRAW_BLOCK = 256
NOT_A_NUMBER = -2
"""In place of a token; -1 is step.TOKEN_ON_DEVICE."""
NONE_ALLOWED = -3


class Sampled(NamedTuple):
    """What a sampling step brings. Log-probabilities are empty unless the step is of kind FULL,
    those of named and of all tokens unless it is STATEFUL."""

    tokens: Int[Array, " R"]
    """NOT_A_NUMBER where the row's logits are NaN, NONE_ALLOWED where its mask leaves no token."""
    logprobs: Float[Array, "R _"]
    """Of the sampled token, or of the row's target."""
    top_ids: Int[Array, "R _"]
    top_logprobs: Float[Array, "R _"]
    named_logprobs: Float[Array, "R _"]
    all_logprobs: Float[Array, "R _"]


def sample(
    logits: Float[Array, "R V"],
    options: RowOptions,
    mask: UInt32[Array, "R W"] | None,
    state: SlotState | None,
    kind: SampleKind,
) -> tuple[Sampled, SlotState | None]:
    """One token a row. `mask` (see token_masks) is for FULL and up, for the others it has been
    applied to the logits; `state`, which is returned with the tokens counted, is for STATEFUL
    only."""
    raw = logits.astype(jnp.float32)
    is_token = jnp.arange(raw.shape[1]) < options.num_tokens[:, None]
    allowed = jnp.where(is_token, raw, -jnp.inf)
    if mask is not None:
        allowed = apply_mask(allowed, mask)
    if state is not None:
        biases = state.bias_values[options.slot] * options.has_bias[:, None]
        allowed = add_bias(allowed, state.bias_ids[options.slot], biases)
        allowed = penalize(allowed, state.counts[options.slot], options)
    tokens, kept = greedy(allowed), allowed
    if kind > SampleKind.GREEDY:
        is_random = options.temperature > 0
        kept = allowed / jnp.where(is_random, options.temperature, 1.0)[:, None]
        if kind >= SampleKind.FILTERED:
            kept = keep_top_k(kept, options.top_k)
            kept = keep_top_p(kept, options.top_p)
            kept = keep_min_p(kept, options.min_p)
        if kind >= SampleKind.STATEFUL:
            kept = keep_typical_p(kept, options.typical_p)
        u = uniform(options.seed_low, options.seed_high, options.position)
        tokens = jnp.where(is_random, draw(kept, u), tokens)
        kept = jnp.where(is_random[:, None], kept, allowed)
    tokens = jnp.where(jnp.max(allowed, axis=-1) == -jnp.inf, NONE_ALLOWED, tokens)
    # the largest is NaN if any is
    tokens = jnp.where(jnp.isnan(jnp.max(raw, axis=-1)), NOT_A_NUMBER, tokens)
    if state is not None:
        state = count_sampled(state, options.token_slot, tokens)
    return Sampled(tokens, *_logprobs(raw, kept, tokens, options, state, kind)), state


def _logprobs(
    raw: Float[Array, "R V"],
    kept: Float[Array, "R V"],
    tokens: Int[Array, " R"],
    options: RowOptions,
    state: SlotState | None,
    kind: SampleKind,
) -> tuple[Array, Array, Array, Array, Array]:
    """Sampled's fields but the first: of `raw` logits, or of those `kept` for sampling."""
    none = jnp.zeros((raw.shape[0], 0), jnp.float32)
    if kind < SampleKind.FULL:
        return none, none.astype(jnp.int32), none, none, none
    asked = jnp.where((options.is_processed == 1)[:, None], kept, raw)
    logprobs = jax.nn.log_softmax(asked, axis=-1)
    top_logprobs, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[-1]))
    token = jnp.where(options.target >= 0, options.target, tokens)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
    top_ids = top_ids.astype(jnp.int32)
    if state is None:
        return chosen, top_ids, top_logprobs, none, none
    named = jnp.take_along_axis(logprobs, state.named_ids[options.slot], axis=-1, mode="clip")
    return chosen, top_ids, top_logprobs, named, logprobs


def greedy(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def apply_mask(logits: Float[Array, "R V"], mask: UInt32[Array, "R W"]) -> Float[Array, "R V"]:
    """Logits of tokens whose bit is 0 become -inf."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def add_bias(
    logits: Float[Array, "R V"], ids: Int[Array, "R B"], values: Float[Array, "R B"]
) -> Float[Array, "R V"]:
    """Adds each of `values` to the logit of its token; an id over the vocabulary is none."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].add(values, mode="drop")


def penalize(
    logits: Float[Array, "R V"], counts: Int[Array, "R V"], options: RowOptions
) -> Float[Array, "R V"]:
    """Repetition penalty for tokens of prompt and output (arXiv:1909.05858, section 4.1), then
    frequency and presence penalty for those of the output. `counts` are SlotState's."""
    repetition = jnp.where(counts > 0, options.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    num_generated = counts >> 1
    logits -= options.frequency_penalty[:, None] * num_generated
    return logits - options.presence_penalty[:, None] * (num_generated > 0)


def keep_top_k(logits: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, "R V"]:
    """Keeps the `top_k` largest of each row (0: all), and all that tie with the last of them."""
    V = logits.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    kept = _keep_largest(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)
    return jnp.where(kept, logits, -jnp.inf)


def keep_top_p(logits: Float[Array, "R V"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Keeps the fewest likeliest tokens whose probability is at least `top_p`, and ties with the
    last. 1: all."""
    kept = _keep_until(logits, jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), top_p)
    return jnp.where(kept, logits, -jnp.inf)


def keep_min_p(logits: Float[Array, "R V"], min_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Drops tokens less likely than `min_p` times the likeliest."""
    least = jnp.max(logits, axis=-1) + jnp.log(min_p)  # log(0) is -inf, which keeps all
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def keep_typical_p(
    logits: Float[Array, "R V"], typical_p: Float[Array, " R"]
) -> Float[Array, "R V"]:
    """Keeps the fewest tokens whose surprise is nearest the entropy and whose probability is at
    least `typical_p`, and ties with the last. 1: all. (arXiv:2202.00666, section 4.)"""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    weights = jnp.exp(logprobs)
    entropy = -jnp.sum(jnp.where(weights > 0, weights * logprobs, 0), axis=-1, keepdims=True)
    kept = _keep_until(-jnp.abs(logprobs + entropy), weights, typical_p)
    return jnp.where(kept, logits, -jnp.inf)


def _keep_until(
    order: Float[Array, "R V"], weights: Float[Array, "R V"], share: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """The fewest that come first in descending `order` and have `share` of the row's weight, and
    ties with the last; all where `share` is 1."""
    target = jnp.where(share < 1, share * jnp.sum(weights, axis=-1), jnp.inf)
    return _keep_largest(
        order, lambda kept: jnp.sum(jnp.where(kept, weights, 0), axis=-1) >= target
    )


def _keep_largest(
    values: Float[Array, "R V"], enough: Callable[[Bool[Array, "R V"]], Bool[Array, " R"]]
) -> Bool[Array, "R V"]:
    """Which values are at or over the largest bound for which `enough(values >= bound)` holds; all
    where there is none."""
    order = _sortable(values)

    def halve(bit, bound):
        trial = bound | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        return jnp.where(enough(order >= trial[:, None]), trial, bound)

    bound = lax.fori_loop(0, 32, halve, jnp.zeros(values.shape[0], jnp.uint32))
    return order >= bound[:, None]


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
