"""One step's inputs: packed by the host into one i32 buffer, taken apart inside the compiled step.

    token_ids[T] | query_start[S+1] | kv_lens[S] | slots[S] | num_decode_rows[1] | page_table[S*P]

Each part starts at a multiple of 256 bytes: XLA hands parts to kernels where they lie, and a Mosaic
GPU kernel takes no pointer of lesser alignment.

A token id of -1 stands for the token that the last step sampled for that sequence, which only the
device knows yet. Positions and cache slots follow from the rest on the device. Padding rows have
kv_len 0 and no tokens; padding tokens write to page 0, which is never handed out.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.buckets import SampleKind, StepShape
from jaxserve.scheduler.sequence import Batch, Row
from jaxserve.types import Request
from pallas_kernels.paged_attention.api import AttentionMeta

TOKEN_ON_DEVICE = -1
ALIGNMENT = 64
"""Of parts, in i32s."""


def layout(shape: StepShape) -> dict[str, slice]:
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


SAMPLE_FIELDS = (
    "slot",
    "seed_low",
    "seed_high",
    "position",
    "top_k",
    "temperature",
    "top_p",
    "min_p",
)
"""Rows of the packed sampling buffer; the last three are float32 bits."""


class Packer:
    """Fills the buffers of steps.

    What stays the same between steps is kept by slot: page-table rows, sampling options.
    """

    def __init__(self, max_num_seqs: int, pages: int):
        self._page_table = np.zeros((max_num_seqs, pages), np.int32)
        self._requests: list[Request | None] = [None] * max_num_seqs
        """Whose options the rows below hold."""
        self._options = np.zeros((len(SAMPLE_FIELDS), max_num_seqs), np.int32)
        self._kinds = np.zeros(max_num_seqs, np.int32)
        self._may_stop_at = np.zeros(max_num_seqs, np.int32)
        """Position from which on stop tokens may be sampled (after `min_tokens`)."""

    def pack(self, batch: Batch, shape: StepShape) -> np.ndarray:
        """The batch as one buffer, i32[packed_size(shape)], rows in the batch's order."""
        rows, parts = batch.rows, layout(shape)
        packed = np.zeros(packed_size(shape), np.int32)
        S, n = shape.seqs, len(rows)
        ids: list[int] = []
        for row in rows:
            if row.num_tokens > 1:
                ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
                if row.token_pending:
                    ids.append(TOKEN_ON_DEVICE)
            else:
                ids.append(
                    TOKEN_ON_DEVICE if row.token_pending else row.sequence.token_ids[row.start]
                )
        packed[: len(ids)] = ids
        query_start = packed[parts["query_start"]]
        query_start[1 : n + 1] = np.cumsum([row.num_tokens for row in rows])
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
        self, batch: Batch, num_rows: int, vocab_size: int, masks: np.ndarray | None = None
    ) -> tuple[SampleKind, np.ndarray, np.ndarray | None]:
        """What the sampler needs: the cheapest kind that serves every row, its buffer, and the
        token masks, if any row has one.

        The buffer is i32[len(SAMPLE_FIELDS), num_rows]. A row that doesn't sample, or is padding,
        has a slot out of range. Masks are u32[num_rows, ceil(V/32)]: bit v%32 of word v//32 says
        whether token v may be sampled. `masks`: the grammars', to which others are added.
        """
        rows = batch.rows
        for row in rows:
            if self._requests[row.slot] is not row.sequence.request:
                self._keep_options(row)
        slots = np.array([row.slot for row in rows])
        packed = np.zeros((len(SAMPLE_FIELDS), num_rows), np.int32)
        packed[0] = len(self._requests)
        samples = np.array([row.samples for row in rows])
        kind = SampleKind(int(self._kinds[slots[samples]].max(initial=0)))
        positions = np.array([row.start + row.num_tokens for row in rows])
        is_early = samples & (positions < self._may_stop_at[slots])
        if kind > SampleKind.GREEDY:
            packed[:, : len(rows)] = self._options[:, slots]
            packed[3, : len(rows)] = positions
        packed[0, : len(rows)] = np.where(samples, slots, len(self._requests))
        if masks is None and (kind == SampleKind.FULL or is_early.any()):
            masks = np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        if masks is not None:
            for r in np.flatnonzero(is_early):
                clear_tokens(masks[r], rows[r].sequence.request.sampling.stop_token_ids)
        return kind, packed, masks

    def _keep_options(self, row: Row) -> None:
        request, slot = row.sequence.request, row.slot
        sampling = request.sampling
        self._requests[slot] = request
        options = self._options[:, slot]
        options[1:3] = _signed(sampling.seed), _signed(sampling.seed >> 32)
        options[4] = sampling.top_k
        options[5:] = np.array(
            (sampling.temperature, sampling.top_p, sampling.min_p), np.float32
        ).view(np.int32)
        self._may_stop_at[slot] = 0
        if sampling.stop_token_ids:
            self._may_stop_at[slot] = row.sequence.num_prompt + sampling.min_tokens
        if sampling.logprobs is not None:
            self._kinds[slot] = SampleKind.FULL
        elif sampling.temperature == 0:
            self._kinds[slot] = SampleKind.GREEDY
        elif sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            self._kinds[slot] = SampleKind.FILTERED
        else:
            self._kinds[slot] = SampleKind.RANDOM


def clear_tokens(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Takes tokens out of a mask, u32[ceil(V/32)], unless that would leave none: then a grammar
    allows nothing else, and it wins."""
    allowed = mask.copy()
    for token in token_ids:
        allowed[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    if allowed.any():
        mask[:] = allowed


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
