"""What an engine tells of itself beyond plain counters: histograms, its latest steps, who runs and
waits, the prefix tree. Imports no jax."""

import bisect
from typing import Literal, Self

import msgspec

STEP_BOUNDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.03, 0.05,
    0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
HOST_BOUNDS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0008, 0.001, 0.0015, 0.002, 0.003,
    0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0,
)  # fmt: skip
COMPILE_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKEN_BOUNDS = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768,
)  # fmt: skip


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """Observations, counted by size; cheap enough for every step and token."""

    bounds: tuple[float, ...]
    """Each the largest value of its count, ascending."""
    counts: list[int]
    """One for each bound, and one for what is larger than all."""
    total: float = 0.0
    """Of all observed values."""

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Self:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, self.counts.copy(), self.total)

    @property
    def count(self) -> int:
        return sum(self.counts)


def step_histogram() -> Histogram:
    return Histogram.of(STEP_BOUNDS)


def host_histogram() -> Histogram:
    return Histogram.of(HOST_BOUNDS)


def compile_histogram() -> Histogram:
    return Histogram.of(COMPILE_BOUNDS)


def token_histogram() -> Histogram:
    return Histogram.of(TOKEN_BOUNDS)


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One step that has been read. Times are of the engine's monotonic clock, in seconds."""

    kind: Literal["decode", "mixed"]
    begin_s: float
    """When it was sent or, if later, the step before it had been read: what the device could begin
    with it."""
    end_s: float
    """When its tokens had been read."""
    host_s: float | None
    """What the host did since it had read the step before; None after a pause."""
    num_rows: int
    num_tokens: int
    room: int
    """Tokens that its compiled shape holds."""


class SequenceRecord(msgspec.Struct, frozen=True, gc=False):
    """A sequence that runs or waits."""

    request_id: str
    """Its beginning, which names the request to who has its log line, and is not enough to end
    it."""
    status: Literal["running", "waiting", "compiling"]
    """Compiling: its grammar is."""
    age_s: float
    num_prompt: int
    num_cached: int
    num_computed: int
    num_generated: int
    max_tokens: int
    num_pages: int
    num_preemptions: int


class PrefixNode(msgspec.Struct, frozen=True, gc=False):
    """A page of the prefix tree."""

    page: int
    above: int
    """The page that it hangs below; 0: none."""
    hits: int
    """Requests that found it in the cache as they were admitted."""
    num_holders: int
    """Sequences that use it now."""
    token_ids: list[int]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """A look into an engine, of bounded size."""

    now_s: float
    """Of the engine's clock."""
    sequences: list[SequenceRecord]
    """Some of those running, oldest first, then some of those waiting."""
    steps: list[StepRecord]
    """The latest, oldest first."""
    num_prefix_pages: int
    """In the tree; `prefix_nodes` are some of them."""
    prefix_nodes: list[PrefixNode]
    """Those most often hit, each after the one above it."""
