"""Which step shapes are compiled at start, and which of them a batch runs in.

A batch runs in the smallest shape that holds it, so denser buckets waste less padding and cost more
start-up time.
"""

import bisect
import dataclasses
import enum
from collections.abc import Sequence
from typing import Literal

from pallas_kernels.decode_matmul.config import COPIED_ROWS

StepKind = Literal["decode", "mixed"]


class SampleKind(enum.IntEnum):
    """What the sampler computes, cheapest first; a batch takes the least that serves all of its
    rows."""

    GREEDY = 0
    """Every row is argmax."""
    RANDOM = 1
    """Temperature only."""
    FILTERED = 2
    """Also top-k, top-p, min-p."""
    FULL = 3
    """Also log-probabilities."""
    STATEFUL = 4
    """Also what slot_state keeps: penalties, logit bias, named tokens; and typical-p, and the
    log-probabilities of the whole vocabulary."""


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """The compile key of a forward step."""

    kind: StepKind
    tokens: int
    seqs: int
    pages: int
    """Width of the page table: pages of the longest sequence there can be."""

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} tokens x {self.seqs} sequences"


@dataclasses.dataclass(frozen=True, order=True)
class SampleShape:
    """The compile key of a sampling step."""

    kind: SampleKind
    rows: int

    def __str__(self) -> str:
        return f"sample {self.kind.name.lower()} x {self.rows}"


def ladder(low: int, high: int, dense_from: int = 32, densest_from: int | None = None) -> list[int]:
    """Powers of two from `low`, with the halfway points (48, 96, ...) from `dense_from` on and the
    quarters (80, 96, 112, ...) from `densest_from` on, up to and including `high`."""
    sizes, size = [], low
    while size < high:
        parts = 2 if size >= dense_from else 1
        if densest_from is not None and size >= densest_from:
            parts = 4
        sizes += range(size, 2 * size, size // parts)
        size *= 2
    return [*(size for size in sizes if size < high), high]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All shapes that an engine compiles."""

    decode_seqs: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    max_num_seqs: int
    """As many as may run or, but on a CPU, a few more."""
    pages: int
    sample_rows: tuple[int, ...] = ()
    """Rows of logits that a step's sequences are rounded up to; empty: as decode_seqs."""

    @classmethod
    def choose(
        cls, *, platform: str, max_num_seqs: int, max_batched_tokens: int, pages: int
    ) -> "Buckets":
        """On a CPU a step costs what its padded tokens cost, and a shape seconds to compile.

        Elsewhere some rows of logits more cost next to nothing, and programs to compile a start;
        rows of a decode step cost little up to 64, which take as long as their weights to read.
        """
        if platform == "cpu":
            sizes = [t for t in (16, 32, 64, 128) if t < max_batched_tokens]
            sizes += ladder(256, max_batched_tokens) if max_batched_tokens > 256 else []
            tokens = tuple(sorted({*sizes, max_batched_tokens}))
            return cls(tuple(ladder(1, max_num_seqs)), tokens, max_num_seqs, pages)
        # Above 8 the kernels for few rows take whole eights only.
        max_num_seqs, max_batched_tokens = (
            n if n <= COPIED_ROWS else -(-n // COPIED_ROWS) * COPIED_ROWS
            for n in (max_num_seqs, max_batched_tokens)
        )
        seqs = ladder(1, max_num_seqs, densest_from=64)
        tokens = ladder(min(256, max_batched_tokens), max_batched_tokens, dense_from=1024)
        powers = ladder(32, max_num_seqs, dense_from=max_num_seqs)
        rows = (8, *powers) if max_num_seqs > 8 else (max_num_seqs,)
        return cls(tuple(seqs), tuple(tokens), max_num_seqs, pages, rows)

    def steps(self) -> list[StepShape]:
        decode = [StepShape("decode", s, s, self.pages) for s in self.decode_seqs]
        mixed = [self._mixed(tokens) for tokens in self.mixed_tokens]
        return [*decode, *mixed]

    def samples(self) -> list[SampleShape]:
        return [SampleShape(kind, rows) for rows in self.logit_rows for kind in SampleKind]

    @property
    def logit_rows(self) -> tuple[int, ...]:
        return self.sample_rows or self.decode_seqs

    def num_logits(self, num_seqs: int) -> int:
        """Rows of logits for so many sequences: one each, and padding."""
        return _smallest(self.logit_rows, num_seqs)

    def _mixed(self, tokens: int) -> StepShape:
        return StepShape("mixed", tokens, min(tokens, self.max_num_seqs), self.pages)

    def step(self, kind: StepKind, num_tokens: int, num_seqs: int) -> StepShape:
        """The smallest compiled shape that holds `num_tokens` of `num_seqs` sequences."""
        if kind == "decode":
            seqs = _smallest(self.decode_seqs, num_seqs)
            return StepShape("decode", seqs, seqs, self.pages)
        # a shape of few tokens has room for as many sequences as tokens, so tokens alone decide
        return self._mixed(_smallest(self.mixed_tokens, max(num_tokens, num_seqs)))


def _smallest(sizes: Sequence[int], need: int) -> int:
    index = bisect.bisect_left(sizes, need)
    assert index < len(sizes), f"a step of {need} is over the largest bucket, {sizes[-1]}"
    return sizes[index]
