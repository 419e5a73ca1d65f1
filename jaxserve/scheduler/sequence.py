"""A request in the making, and what one step computes of it.

Two counts against the known tokens say how far a sequence is:

    token_ids    | prompt ....... | generated | + num_pending sampled, not known to the host yet
    num_computed |--------------------------->|   tokens whose KV is computed or in flight

Prefill, chunks of it, decoding, prefix hits and recomputing after preemption are all `num_computed`
catching up.
"""

import dataclasses
from array import array
from typing import Any, Literal, Protocol

import msgspec

from jaxserve.memory.radix_cache import Node
from jaxserve.types import FinishReason, Request


class Matcher(Protocol):
    """Follows a sequence's generated tokens through the grammar that they must keep to."""

    error: str
    """Why the grammar can't be followed any more; empty as long as it can."""

    def advance(self, token: int, room: int) -> tuple[list[int], FinishReason | None]:
        """Takes a sampled token; returns what the sequence goes on with, and whether that ends it.

        That is the token and those that the grammar leaves no choice after it, `room` in all at the
        most; or others in its place, where it would leave too little room to complete the text; or
        none, and the position is to be sampled again.
        """
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request's state, from `Scheduler.add` until it finishes. The scheduler alone changes it."""

    request: Request
    token_ids: "array[int]"
    """Known tokens: the prompt, then those committed."""
    num_prompt: int
    max_total: int
    """Tokens, prompt included, at which it ends."""
    stop_token_ids: frozenset[int]
    slot: int = -1
    """Its row in device state while it runs; -1 else."""
    status: Literal["waiting", "running", "finished"] = "waiting"
    finish_reason: FinishReason | None = None
    num_pending: int = 0
    """Tokens sampled, or to be sampled by a step in flight, that are not committed yet."""
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens that the prefix cache had when it was first admitted."""
    num_scored: int = 0
    """Leading tokens that the log-probabilities of their next are known of, or not asked for."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Admissions of others while it was the first in line."""

    pages: list[int] = dataclasses.field(default_factory=list)
    root: tuple = ()
    """The prefix tree that its pages belong to."""
    num_shared: int = 0
    """Leading pages that are in the prefix tree; the others are its own."""
    share_at: int = 0
    """Known and computed tokens at which the next page can join the prefix tree."""
    num_told: int = 0
    """Leading pages that batches have already told the packer about."""
    match_hint: tuple[int, int] = (-1, 0)
    """(step, pages) of the last look at what the prefix cache has of it, for the policy."""

    pools: bool = False
    """Its hidden states are wanted, which no decode step gives."""
    pooled: Any = None
    """What steps brought of them, for the loop."""
    is_ready: bool = True
    """Not while its grammar is being compiled: it keeps its place in line and holds nobody up."""
    matcher: Matcher | None = None
    draft_ids: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        num_prompt = len(request.token_ids)
        sampling = request.sampling
        return cls(
            request=request,
            token_ids=array("i", request.token_ids),
            num_prompt=num_prompt,
            max_total=num_prompt + sampling.max_tokens,
            num_scored=sampling.prompt_logprobs_start,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            pools=request.pooling is not None,
        )

    @property
    def num_generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.token_ids) - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """What it computes next is of its prompt, whose log-probabilities are asked for and not all
        known: each token from `num_scored` on is a row of its own, with logits of its own, and
        cached pages beyond it are no use."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and self.num_scored < self.num_prompt - 1
            and self.num_computed < self.num_prompt
        )

    @property
    def prefix_node(self) -> Node:
        """Its deepest node of the prefix tree: a page, or the root."""
        return self.pages[self.num_shared - 1] if self.num_shared else self.root


class Row(msgspec.Struct, frozen=True, gc=False):
    """What one step computes of one sequence: tokens [start, start + num_tokens)."""

    sequence: Sequence
    slot: int
    """The sequence's slot in this step; it may have none by the time the tokens are read."""
    start: int
    num_tokens: int
    samples: bool
    """The step samples the token at position start + num_tokens."""
    token_pending: bool
    """The row's last token is not known to the host: it's the one last sampled for the slot."""
    scores: bool = False
    """The step tells the log-probability of the prompt's token at position start + num_tokens."""


class PageUpdate(msgspec.Struct, frozen=True, gc=False):
    """Pages [first, first + len(pages)) of the sequence at `slot` are now these."""

    slot: int
    first: int
    pages: list[int]


class Batch(msgspec.Struct):
    """One step. Every batch must be run, in the order they were scheduled."""

    rows: list[Row]
    """Decode rows first: one token each, and they sample or score. A sequence may have many that
    score."""
    num_decode_rows: int
    num_tokens: int
    sampling_rows: list[Row]
    """The rows that sample, in the order of `rows`: what `Scheduler.commit` wants tokens for."""
    page_updates: list[PageUpdate]
    """What changed in the page table since the batch before; a whole row for a new sequence."""
    admitted: list[Sequence] = []
    """Those whose first step it is."""

    @property
    def kind(self) -> Literal["decode", "mixed"]:
        """With "decode" each row is the one new token of a sequence of its own: no row sees
        another's new tokens."""
        if self.num_decode_rows < len(self.rows) or any(row.scores for row in self.rows):
            return "mixed"
        return "decode"

    @property
    def scoring_rows(self) -> list[Row]:
        """In the order of `rows`: what `Scheduler.commit_scores` is about."""
        return [row for row in self.rows if row.scores]

    def withdraw(self, sequence: Sequence) -> bool:
        """Has the step not sample for a sequence; False if it doesn't anyway."""
        if not any(row.sequence is sequence for row in self.sampling_rows):
            return False
        self.sampling_rows = [row for row in self.sampling_rows if row.sequence is not sequence]
        self.rows = [
            msgspec.structs.replace(row, samples=False) if row.sequence is sequence else row
            for row in self.rows
        ]
        return True


class Committed(msgspec.Struct, frozen=True, gc=False):
    """A sequence's tokens that became known."""

    index: int
    """Which of the batch's `sampling_rows` it's from."""
    sequence: Sequence
    tokens: list[int]
    """One, unless a grammar says more; none where it asks to sample again, or with `error`."""
    finish_reason: FinishReason | None
