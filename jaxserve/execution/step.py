"""One step's inputs: packed by the host into one i32 buffer, taken apart inside the compiled step.

    token_ids[T] | query_start[S+1] | kv_lens[S] | slots[S] | num_decode_rows[1] | page_table[S*P]

Each part starts at a multiple of 256 bytes: XLA hands parts to kernels where they lie, and a Mosaic
GPU kernel takes no pointer of lesser alignment.

A token id of -1 stands for the token that the last step sampled for that sequence, which only the
device knows yet. Positions and cache slots follow from the rest on the device. Padding rows have
kv_len 0 and no tokens; padding tokens write to page 0, which is never handed out.
"""

import dataclasses
import functools
import itertools
from array import array
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.execution.buckets import SampleKind, StepShape
from jaxserve.execution.slot_state import pack_start
from jaxserve.execution.token_masks import RowMask, all_allowed, mask_words, needs_mask
from jaxserve.scheduler.sequence import Batch, Row
from jaxserve.types import ALL_LOGPROBS, Request, TokenSampling
from pallas_kernels.paged_attention.api import AttentionMeta

TOKEN_ON_DEVICE = -1
ALIGNMENT = 64
"""Of parts, in i32s."""


@functools.cache
def layout(shape: StepShape) -> Mapping[str, slice]:
    """Where each part of a packed buffer lies."""
    sizes = {
        "token_ids": shape.tokens,
        "query_start": shape.seqs + 1,
        "kv_lens": shape.seqs,
        "slots": shape.seqs,
        "num_decode_rows": 1,
        "page_table": shape.seqs * shape.pages,
    }
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = slice(start, start + size)
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return parts


def packed_size(shape: StepShape) -> int:
    return layout(shape)["page_table"].stop


class RowOptions(NamedTuple):
    """What the sampler needs to know of each row; packed as i32[F, R], one of these a line."""

    slot: Int[Array, " R"]
    token_slot: Int[Array, " R"]
    """The slot, or one out of range where the row's token is not to be kept."""
    seed_low: Int[Array, " R"]
    seed_high: Int[Array, " R"]
    position: Int[Array, " R"]
    """Of the token to sample."""
    num_tokens: Int[Array, " R"]
    """Token ids from here on are padding of the vocabulary."""
    target: Int[Array, " R"]
    """The token whose log-probability is asked for; -1: the sampled one."""
    is_processed: Int[Array, " R"]
    """1: log-probabilities of what is sampled from; 0: of the model's own distribution."""
    has_bias: Int[Array, " R"]
    """1: slot_state's logit bias is this row's, not left there by another sequence."""
    top_k: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    typical_p: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]

    @classmethod
    def unpack(cls, packed: Int[Array, "F R"]) -> "RowOptions":
        floats = lax.bitcast_convert_type(packed[FIRST_FLOAT:], jnp.float32)
        return cls(*packed[:FIRST_FLOAT], *floats)


FIRST_FLOAT = RowOptions._fields.index("temperature")
FLOAT_FIELDS = RowOptions._fields[FIRST_FLOAT:]
LINE = {name: index for index, name in enumerate(RowOptions._fields)}


@dataclasses.dataclass(frozen=True)
class SamplingInput:
    """What the sampling of one step needs; R rows."""

    kind: SampleKind
    """The cheapest that serves every row."""
    options: np.ndarray
    """RowOptions, i32[F, R]."""
    masks: np.ndarray | None
    """Which tokens each row may sample, u32[R, ceil(V/32)] (see token_masks); None: any."""
    starts: list[np.ndarray]
    """Calls of slot_state.start_row that must come before."""


class Packer:
    """Fills the buffers of steps.

    What stays the same between steps is kept by slot: page-table rows, sampling options, masks.
    """

    def __init__(self, max_num_seqs: int, pages: int, vocab_size: int):
        self._page_table = np.zeros((max_num_seqs, pages), np.int32)
        self._vocab_size = vocab_size
        self._requests: list[Request | None] = [None] * max_num_seqs
        """Whose options the rows below hold."""
        self._options = np.zeros((len(LINE), max_num_seqs), np.int32)
        self._kinds = np.zeros(max_num_seqs, np.int32)
        self._row_masks: list[RowMask | None] = [None] * max_num_seqs
        self._masked_until = np.zeros(max_num_seqs, np.int64)
        """Position from which on the row needs no mask."""

    def pack(self, batch: Batch, shape: StepShape) -> np.ndarray:
        """The batch as one buffer, i32[packed_size(shape)], rows in the batch's order."""
        rows, parts = batch.rows, layout(shape)
        packed = np.zeros(packed_size(shape), np.int32)
        S, n = shape.seqs, len(rows)
        single, chunks = rows[: batch.num_decode_rows], rows[batch.num_decode_rows :]
        ids = array(
            "i",
            [
                TOKEN_ON_DEVICE if row.token_pending else row.sequence.token_ids[row.start]
                for row in single
            ],
        )
        for row in chunks:
            ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
            if row.token_pending:
                ids.append(TOKEN_ON_DEVICE)
        packed[: len(ids)] = ids
        query_start = packed[parts["query_start"]]
        query_start[1 : n + 1] = list(itertools.accumulate(row.num_tokens for row in rows))
        query_start[n + 1 :] = len(ids)
        packed[parts["kv_lens"]][:n] = [row.start + row.num_tokens for row in rows]
        slots = [row.slot for row in rows]
        packed[parts["slots"]][:n] = slots
        packed[parts["num_decode_rows"]] = batch.num_decode_rows
        for update in batch.page_updates:
            last = update.first + len(update.pages)
            self._page_table[update.slot, update.first : last] = update.pages
        packed[parts["page_table"]].reshape(S, shape.pages)[:n] = self._page_table[slots]
        return packed

    def pack_sampling(
        self, batch: Batch, num_rows: int, grammar_masks: np.ndarray | None = None
    ) -> SamplingInput:
        """The sampling of the batch's rows, padded to `num_rows`. All their tokens must be known.

        Masks come with any kind, and are None where no row has one. `grammar_masks`: the
        grammars', u32[num_rows, ceil(V/32)], to which others are added; where nothing is left the
        grammar wins, as where it can only end before `min_tokens`.
        """
        rows = batch.rows
        starts: list[np.ndarray] = []
        for row in rows:
            if self._requests[row.slot] is not row.sequence.request:
                starts += self._keep_options(row)
        n, slots = len(rows), np.array([row.slot for row in rows])
        samples = np.array([row.samples for row in rows])
        positions = np.array([row.start + row.num_tokens for row in rows])
        is_masked = samples & (positions < self._masked_until[slots])
        kind = SampleKind(int(self._kinds[slots[samples]].max(initial=0)))
        options = np.zeros((len(LINE), num_rows), np.int32)
        options[LINE["token_slot"]] = len(self._requests)
        options[:, :n] = self._options[:, slots]
        options[LINE["position"], :n] = positions
        options[LINE["token_slot"], :n] = np.where(samples, slots, len(self._requests))
        for r, row in enumerate(rows if len(batch.sampling_rows) < n else ()):
            if not row.scores:
                continue
            kind = max(kind, _scoring_kind(row.sequence.request.sampling))
            options[LINE["target"], r] = row.sequence.token_ids[row.start + 1]
            options[LINE["is_processed"], r] = 0
        masks = grammar_masks
        if is_masked.any():
            if masks is None:
                masks = all_allowed(num_rows, mask_words(self._vocab_size))
            for r in np.flatnonzero(is_masked):
                row_mask = self._row_masks[rows[r].slot]
                assert row_mask is not None
                own = np.empty_like(masks[r])
                row_mask.fill(int(positions[r]), own)
                own &= masks[r]
                if own.any() or rows[r].sequence.matcher is None:
                    masks[r] = own
        return SamplingInput(kind, options, masks, starts)

    def _keep_options(self, row: Row) -> list[np.ndarray]:
        """Sets what is kept of the row's slot; returns the calls of slot_state.start_row that set
        the device's part of it."""
        sequence, slot = row.sequence, row.slot
        request, sampling = sequence.request, sequence.request.sampling
        self._requests[slot] = request
        options = self._options[:, slot]
        options[LINE["slot"]] = slot
        options[LINE["seed_low"]] = _signed(sampling.seed)
        options[LINE["seed_high"]] = _signed(sampling.seed >> 32)
        options[LINE["num_tokens"]] = sampling.num_tokens or self._vocab_size
        options[LINE["target"]] = -1
        options[LINE["is_processed"]] = sampling.logprobs_mode == "processed_logprobs"
        options[LINE["has_bias"]] = bool(sampling.logit_bias)
        options[LINE["top_k"]] = sampling.top_k
        floats = [getattr(sampling, name) for name in FLOAT_FIELDS]
        options[FIRST_FLOAT:] = np.array(floats, np.float32).view(np.int32)
        self._kinds[slot] = sample_kind(sampling)
        self._row_masks[slot], self._masked_until[slot] = None, 0
        has_mask = needs_mask(sampling)
        if has_mask or (sampling.stop_token_ids and sampling.min_tokens):
            self._row_masks[slot] = RowMask(sequence, self._vocab_size)
            self._masked_until[slot] = sequence.num_prompt + sampling.min_tokens
        if has_mask:
            self._masked_until[slot] = np.iinfo(np.int64).max
        kinds = {sample_kind(sampling), _scoring_kind(sampling)}
        return pack_start(sequence, slot) if SampleKind.STATEFUL in kinds else []


def sample_kind(sampling: TokenSampling) -> SampleKind:
    """The cheapest kind that serves a request's rows, token masks apart."""
    if (
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.typical_p < 1
        or sampling.token_ids_logprob
        or sampling.logprobs == ALL_LOGPROBS
    ):
        return SampleKind.STATEFUL
    if sampling.logprobs is not None:
        return SampleKind.FULL
    if sampling.temperature == 0:
        return SampleKind.GREEDY
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        return SampleKind.FILTERED
    return SampleKind.RANDOM


def _scoring_kind(sampling: TokenSampling) -> SampleKind:
    """What the rows of a prompt whose log-probabilities are asked for need."""
    if sampling.prompt_logprobs == ALL_LOGPROBS or sampling.token_ids_logprob:
        return SampleKind.STATEFUL
    return SampleKind.FULL


def _signed(value: int) -> int:
    """The low 32 bits, as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def unpack(
    packed: jax.Array, last_token: jax.Array, shape: StepShape, page_size: int
) -> tuple[jax.Array, jax.Array, AttentionMeta, jax.Array]:
    """-> token_ids i32[T], positions i32[T], attention's meta, logit_rows i32[S]: each row's last
    token."""
    T, S = shape.tokens, shape.seqs
    token_ids, query_start, kv_lens, slots, num_decode_rows, page_table = (
        packed[part] for part in layout(shape).values()
    )
    page_table = page_table.reshape(S, shape.pages)
    token = jnp.arange(T, dtype=jnp.int32)
    if shape.kind == "decode":
        seq = token
        positions = jnp.maximum(kv_lens - 1, 0)
        is_real = kv_lens > 0
    else:
        seq = jnp.searchsorted(query_start, token, side="right", method="compare_all") - 1
        seq = jnp.minimum(seq.astype(jnp.int32), S - 1)
        query_end = query_start[1:]
        positions = kv_lens[seq] - query_end[seq] + token
        is_real = token < query_start[S]
        positions = jnp.where(is_real, positions, 0)
    page = page_table[seq, positions // page_size]
    slot_mapping = jnp.where(is_real, page * page_size + positions % page_size, token % page_size)
    token_ids = jnp.where(token_ids == TOKEN_ON_DEVICE, last_token[slots[seq]], token_ids)
    meta = AttentionMeta(
        page_table=page_table,
        kv_lens=kv_lens,
        query_start=query_start,
        slot_mapping=slot_mapping,
        num_decode_rows=num_decode_rows[0],
    )
    return token_ids, positions, meta, jnp.maximum(query_start[1:] - 1, 0)
