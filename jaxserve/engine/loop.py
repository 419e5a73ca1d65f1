"""The engine's loop: takes requests from its link, runs steps one ahead of reading them, sends
tokens back.

    step N     forward ── sample ─┐
    step N+1            forward ──┼── sample ─┐         the device's order
    host       schedule N+1, pack │ commit N, send, schedule N+2 ...

The forward of step N+1 is in flight while the tokens of step N are read: rows that continue take
those tokens on the device. Only what step N finished is discovered a step late, and its extra row
is thrown away.
"""

import time

import msgspec

from jaxserve import messages
from jaxserve.engine.pooling import PooledParts
from jaxserve.execution.runner import Pending, Runner
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.types import EngineStats, InvalidRequest, TokenOutput


def _embedding(sequence: Sequence) -> bytes | None:
    pooling = sequence.request.pooling
    if pooling is None:
        return None
    return sequence.pooled.result(pooling, sequence.num_prompt).tobytes()


class Engine:
    """Owns the scheduler and the runner. `run` returns after a Shutdown message; any error in a
    step ends it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        link: messages.EngineEnd,
        *,
        overlap: bool = True,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._link = link
        self._overlap = overlap
        self._pending: Pending | None = None
        self._stop_at_s: float | None = None
        """After a Shutdown: when whatever still runs is ended."""
        self._refused: list[TokenOutput] = []

    def run(self) -> None:
        while not self._is_over():
            idle = not self._scheduler.has_work and self._pending is None
            for message in self._link.receive(self._patience() if idle else 0):
                self._handle(message)
            self.step()
        self._abandon()
        self._runner.close()
        self._link.send(messages.Stopped())

    def step(self) -> None:
        """Sends one step if anything can run, and reads the one before it."""
        batch = self._scheduler.schedule()
        logits = None
        if batch is not None:
            logits = self._runner.forward(batch)
        self._read_pending()
        if batch is not None and logits is not None:
            self._pending = self._runner.sample(batch, logits)
            if not self._overlap:
                self._read_pending()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._scheduler.stats(), num_runtime_compiles=self._runner.num_runtime_compiles
        )

    def _read_pending(self) -> None:
        """Commits the tokens of the step in flight, if any, and sends them."""
        outputs: list[TokenOutput] = []
        if self._pending is not None:
            pending, self._pending = self._pending, None
            collected = self._runner.collect(pending)
            for row, last, total in collected.pooled:
                parts = row.sequence.pooled = row.sequence.pooled or PooledParts()
                parts.add(row.start, row.start + row.num_tokens, last, total)
            for committed in self._scheduler.commit(pending.batch, collected.tokens):
                sequence = committed.sequence
                logprobs = collected.logprobs[committed.index]
                if committed.token < 0:
                    self._refuse(sequence.request.request_id, "the model's output is not a number")
                    continue
                outputs.append(
                    TokenOutput(
                        request_id=sequence.request.request_id,
                        token_ids=[committed.token],
                        finish_reason=committed.finish_reason,
                        num_cached_tokens=sequence.num_cached,
                        logprobs=None if logprobs is None else [logprobs],
                        embedding=_embedding(sequence),
                    )
                )
        outputs += self._refused
        self._refused = []
        if outputs:
            self._link.send(messages.Outputs(outputs, self.stats()))

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit(request):
                if self._stop_at_s is not None:
                    self._refuse(request.request_id, "the engine is shutting down")
                    return
                try:
                    self._scheduler.add(request)
                except InvalidRequest as error:
                    self._refuse(request.request_id, str(error))
            case messages.Abort(request_ids):
                aborted = [id for id in request_ids if self._scheduler.abort(id)]
                if aborted:
                    self._link.send(
                        messages.Outputs(
                            [
                                TokenOutput(request_id=id, token_ids=[], finish_reason="abort")
                                for id in aborted
                            ],
                            self.stats(),
                        )
                    )
            case messages.FlushCache():
                self._scheduler.flush_cache()
            case messages.Shutdown(grace_s):
                self._stop_at_s = time.monotonic() + grace_s

    def _refuse(self, request_id: str, reason: str) -> None:
        self._refused.append(
            TokenOutput(request_id=request_id, token_ids=[], finish_reason="error", error=reason)
        )

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        idle = not self._scheduler.has_work and self._pending is None
        return idle or time.monotonic() >= self._stop_at_s

    def _patience(self) -> float | None:
        """How long to wait for a message when there is nothing to run."""
        return None if self._stop_at_s is None else max(0.0, self._stop_at_s - time.monotonic())

    def _abandon(self) -> None:
        """Tells those still running that the engine ends; reads the step in flight so that the
        device is idle."""
        self._read_pending()
        for request_id in list(self._scheduler.sequences):
            self._scheduler.abort(request_id)
            self._refuse(request_id, "the engine is shutting down")
        self._read_pending()
