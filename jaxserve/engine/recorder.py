"""Times the loop's steps: a few microseconds a step, and what it keeps is of bounded size. No
jax."""

import collections
import time
from typing import Literal

from jaxserve.execution.buckets import Buckets
from jaxserve.observation import (
    EngineState,
    Histogram,
    SequenceRecord,
    StepRecord,
    host_histogram,
    step_histogram,
    token_histogram,
)
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Batch, Sequence

STEPS_KEPT = 240
SEQUENCES_SHOWN = 32
"""Of those running, and of those waiting, in an EngineState."""
PAGES_SHOWN = 256
ID_CHARACTERS = 16
"""Of a request's id in an EngineState, and never more than half of it."""


type Kept = tuple[Literal["decode", "mixed"], float, float, float | None, int, int]
"""kind, begin_s, end_s, host_s, rows, tokens"""


class Recorder:
    """What one engine's steps took.

        host    | forward N+1 ........ | wait for N | commit N, sample N+1, forward N+2 | wait
        clock   sent(N+1)              wait_s       read_s                              wait_s'

    A step lasts from when it was sent, or when the one before had been read if that was later,
    until it has been read; the host's gap is from there to its next wait.
    """

    def __init__(self):
        self.step_seconds: dict[str, Histogram] = {
            "decode": step_histogram(),
            "mixed": step_histogram(),
        }
        self.host_gap_seconds = host_histogram()
        self.step_tokens = token_histogram()
        self._steps: collections.deque[Kept] = collections.deque(maxlen=STEPS_KEPT)
        self._read_s: float | None = None
        """When a step was last read; None after a pause."""

    def pause(self) -> None:
        """The loop waited for messages: what comes next is no gap."""
        self._read_s = None

    def record(self, batch: Batch, sent_s: float, wait_s: float) -> None:
        """A step has just been read, sent at `sent_s` and waited for since `wait_s`."""
        read_s, last_s = time.monotonic(), self._read_s
        begin_s, host_s = sent_s, None
        if last_s is not None:
            begin_s, host_s = max(sent_s, last_s), wait_s - last_s
            self.host_gap_seconds.observe(host_s)
        self._read_s = read_s
        kind, num_tokens = batch.kind, batch.num_tokens
        self.step_seconds[kind].observe(read_s - begin_s)
        self.step_tokens.observe(num_tokens)
        self._steps.append((kind, begin_s, read_s, host_s, len(batch.rows), num_tokens))

    def state(
        self, scheduler: Scheduler, compiling: list[Sequence], buckets: Buckets
    ) -> EngineState:
        """The engine now. Takes about a millisecond."""
        now_s = time.monotonic()
        waits = {id(sequence) for sequence in compiling}
        shown = [*scheduler.running[:SEQUENCES_SHOWN], *scheduler.waiting[:SEQUENCES_SHOWN]]
        return EngineState(
            now_s=now_s,
            sequences=[_describe(s, now_s, id(s) in waits) for s in shown],
            steps=[
                StepRecord(*kept, room=buckets.step(kept[0], kept[5], kept[4]).tokens)
                for kept in self._steps
            ],
            num_prefix_pages=len(scheduler.cache),
            prefix_nodes=scheduler.cache.most_hit(PAGES_SHOWN),
        )


def _describe(sequence: Sequence, now_s: float, compiles: bool) -> SequenceRecord:
    request_id = sequence.request.request_id
    return SequenceRecord(
        request_id=request_id[: min(ID_CHARACTERS, len(request_id) // 2)],
        status="compiling" if compiles else "running" if sequence.slot >= 0 else "waiting",
        age_s=max(0.0, now_s - sequence.request.arrival_s),
        num_prompt=sequence.num_prompt,
        num_cached=sequence.num_cached,
        num_computed=sequence.num_computed,
        num_generated=sequence.num_generated,
        max_tokens=sequence.request.sampling.max_tokens,
        num_pages=len(sequence.pages),
        num_preemptions=sequence.num_preemptions,
    )
