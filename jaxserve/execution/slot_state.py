"""What the sampler keeps on the device by slot, for rows of kind STATEFUL: how often each token
came so far, and the lists that would be too long to send with every step.

    start_row      when a sequence that needs it gets a slot: from the tokens that it has then
    count_sampled  in each sampling step: its tokens are known nowhere else yet

A sequence gets a slot with all of its tokens known, prompt and those generated before a preemption,
so cached prefixes, chunks and the step in flight make no difference.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.scheduler.sequence import Sequence
from jaxserve.types import MAX_LOGIT_BIAS, MAX_NAMED_TOKENS

CHUNK = 2048
"""Tokens that one call of `start_row` takes."""
NO_TOKEN = 2**31 - 1
"""In place of a token id, where a list has fewer; over any vocabulary, so scatters drop it."""

_HEADER = 3
_BIAS_IDS = _HEADER + CHUNK
_BIAS_VALUES = _BIAS_IDS + MAX_LOGIT_BIAS
_NAMED_IDS = _BIAS_VALUES + MAX_LOGIT_BIAS
PACKED_SIZE = _NAMED_IDS + MAX_NAMED_TOKENS


class SlotState(NamedTuple):
    """For all of N slots; donated to each step that uses it."""

    counts: Int[Array, "N V"]
    """Twice how often the output has the token, and 1 if the prompt has it."""
    bias_ids: Int[Array, "N B"]
    bias_values: Float[Array, "N B"]
    named_ids: Int[Array, "N K"]


def empty(num_slots: int, vocab_size: int) -> SlotState:
    """The state of slots that nobody has had."""
    return SlotState(
        jnp.zeros((num_slots, vocab_size), jnp.int32),
        jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.int32),
        jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
        jnp.zeros((num_slots, MAX_NAMED_TOKENS), jnp.int32),
    )


def pack_start(sequence: Sequence, slot: int) -> list[np.ndarray]:
    """What `start_row` needs of a sequence that has just got a slot: i32[PACKED_SIZE] for each of
    its calls."""
    sampling = sequence.request.sampling
    packed = np.full(PACKED_SIZE, NO_TOKEN, np.int32)
    packed[0] = slot
    bias = sampling.logit_bias
    packed[_BIAS_IDS : _BIAS_IDS + len(bias)] = list(bias)
    values = packed[_BIAS_VALUES:_NAMED_IDS].view(np.float32)
    values[:] = 0
    values[: len(bias)] = list(bias.values())
    packed[_NAMED_IDS : _NAMED_IDS + len(sampling.token_ids_logprob)] = sampling.token_ids_logprob
    calls = []
    for start in range(0, len(sequence.token_ids), CHUNK):
        token_ids = sequence.token_ids[start : start + CHUNK]
        call = packed.copy()
        call[1:_HEADER] = start, sequence.num_prompt
        call[_HEADER : _HEADER + len(token_ids)] = token_ids
        calls.append(call)
    return calls


def start_row(state: SlotState, packed: Int[Array, " _"]) -> SlotState:
    """Sets a slot's state; each call after a sequence's first adds CHUNK tokens to it."""
    slot, start, num_prompt = packed[0], packed[1], packed[2]
    token_ids = packed[_HEADER:_BIAS_IDS]
    is_prompt = start + jnp.arange(CHUNK) < num_prompt
    counts = jnp.where(start > 0, state.counts[slot], 0)
    counts = counts.at[token_ids].add(jnp.where(is_prompt, 0, 2), mode="drop")
    # set, not added: another chunk may have it too
    in_prompt = jnp.zeros_like(counts).at[token_ids].max(is_prompt.astype(jnp.int32), mode="drop")
    values = lax.bitcast_convert_type(packed[_BIAS_VALUES:_NAMED_IDS], jnp.float32)
    return SlotState(
        state.counts.at[slot].set(counts | in_prompt),
        state.bias_ids.at[slot].set(packed[_BIAS_IDS:_BIAS_VALUES]),
        state.bias_values.at[slot].set(values),
        state.named_ids.at[slot].set(packed[_NAMED_IDS:]),
    )


def count_sampled(state: SlotState, slots: Int[Array, " R"], tokens: Int[Array, " R"]) -> SlotState:
    """Counts each row's sampled token; a slot that is out of range, or a token that is none, isn't
    counted."""
    tokens = jnp.where(tokens < 0, NO_TOKEN, tokens)
    return state._replace(counts=state.counts.at[slots, tokens].add(2, mode="drop"))
