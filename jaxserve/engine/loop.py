"""The engine's loop: takes requests from its link, runs steps one ahead of reading them, sends
tokens back.

    step N     forward ── sample ─┐
    step N+1            forward ──┼── sample ─┐         the device's order
    host       schedule N+1, pack │ commit N, send, schedule N+2 ...

The forward of step N+1 is in flight while the tokens of step N are read: rows that continue take
those tokens on the device. Only what step N finished is discovered a step late, and its extra row
is thrown away. Token masks follow from the tokens of step N, so they are made between its commit
and the sampling of step N+1, while the device runs the forward.
"""

import time

import msgspec

from jaxserve import messages
from jaxserve.constrained.compiler import Grammars, Job
from jaxserve.engine.pooling import PooledParts
from jaxserve.engine.recorder import Recorder
from jaxserve.execution.runner import Collected, Pending, Runner
from jaxserve.execution.sampling import NONE_ALLOWED, NOT_A_NUMBER
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.types import EngineStats, InvalidRequest, TokenLogprobs, TokenOutput

FAULTS = {
    NOT_A_NUMBER: "the model's output is not a number",
    NONE_ALLOWED: "the request's options leave no token that may come next",
}
"""Why a request ends whose sampled token is none."""

FORBIDDING = ("allowed_token_ids", "bad_words", "no_repeat_ngram_size", "min_tokens", "logit_bias")
"""Options that forbid tokens, the likeliest to have forbidden all of them first."""

STATS_INTERVAL_S = 0.05
"""How often a busy engine tells its counters."""

COMPILE_POLL_S = 0.001
"""How long to wait for messages when nothing can run but what waits for its grammar."""


def _fault(sequence: Sequence, token: int) -> tuple[str, str | None]:
    """(why a sequence ended with an error, the request's field that is to blame, if any is)."""
    sampling, matcher = sequence.request.sampling, sequence.matcher
    if matcher is not None and matcher.error:
        return matcher.error, sampling.grammar and sampling.grammar.field
    if token != NONE_ALLOWED:
        return FAULTS[token], None
    field = next((name for name in FORBIDDING if getattr(sampling, name)), None)
    return FAULTS[token], field or (sampling.grammar and sampling.grammar.field)


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
        grammars: Grammars,
        *,
        overlap: bool = True,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._link = link
        self._grammars = grammars
        self._compiling: list[tuple[Sequence, Job]] = []
        """Those in line whose grammar isn't compiled yet."""
        self._overlap = overlap
        self._pending: Pending | None = None
        self._sent_s = 0.0
        """When that was sent."""
        self._recorder = Recorder()
        self._stats_due_s = 0.0
        self._num_corrupted = 0
        self._stop_at_s: float | None = None
        """After a Shutdown: when whatever still runs is ended."""
        self._told: list[TokenOutput] = []
        """Outputs that no step brought, to be sent with the next ones."""

    def run(self) -> None:
        while not self._is_over():
            patience_s = self._patience()
            for message in self._link.receive(patience_s):
                self._handle(message)
            if patience_s != 0:
                self._recorder.pause()
            self.step()
        self._abandon()
        self._grammars.close()
        self._runner.close()
        self._link.send(messages.Stopped())

    def step(self) -> None:
        """Sends one step if anything can run, and reads the one before it."""
        if self._compiling:
            self._take_compiled()
        batch = self._scheduler.schedule()
        sent_s = time.monotonic()
        logits = None
        if batch is not None:
            logits = self._runner.forward(batch)
        self._read_pending()
        if batch is not None and logits is not None:
            masks = self._grammars.masks(batch, logits.shape[0])
            self._pending = self._runner.sample(batch, logits, masks)
            self._sent_s = sent_s
            if not self._overlap:
                self._read_pending()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._scheduler.stats(),
            num_corrupted=self._num_corrupted,
            num_runtime_compiles=self._runner.num_runtime_compiles,
            runtime_compile_s=self._runner.runtime_compile_s,
            step_seconds={
                kind: seconds.copy() for kind, seconds in self._recorder.step_seconds.items()
            },
            host_gap_seconds=self._recorder.host_gap_seconds.copy(),
            step_tokens=self._recorder.step_tokens.copy(),
            buckets=self._runner.bucket_stats,
            num_grammar_requests=self._grammars.num_requests,
            num_grammars_compiling=len(self._compiling),
            num_grammar_hits=self._grammars.num_hits,
            num_grammar_failures=self._grammars.num_failures,
            num_grammar_timeouts=self._grammars.num_timeouts,
            grammar_compile_seconds=self._grammars.compile_seconds.copy(),
        )

    def _take_compiled(self) -> None:
        """Lets those in whose grammar is compiled, and refuses those whose can't be."""
        still: list[tuple[Sequence, Job]] = []
        for sequence, job in self._compiling:
            request = sequence.request
            if sequence.status == "finished":  # aborted
                continue
            if not job.is_over():
                still.append((sequence, job))
                continue
            try:
                sequence.matcher = job.matcher(request.sampling)
            except InvalidRequest as error:
                self._scheduler.abort(request.request_id, "error")
                self._refuse(request.request_id, error.message, error.field)
                continue
            sequence.is_ready = True
            self._told.append(TokenOutput(request_id=request.request_id, token_ids=[]))
        self._compiling = still

    def _read_pending(self) -> None:
        """Commits the tokens of the step in flight, if any, and sends them."""
        outputs: list[TokenOutput] = []
        admitted: list[tuple[str, float]] = []
        pending, self._pending = self._pending, None
        if pending is not None:
            wait_s = time.monotonic()
            collected = self._runner.collect(pending)
            self._recorder.record(pending.batch, self._sent_s, wait_s)
            for sequence in pending.batch.admitted:
                request = sequence.request
                admitted.append((request.request_id, max(0.0, self._sent_s - request.arrival_s)))
            outputs += self._prompt_outputs(pending, collected)
            for row, last, total in collected.pooled:
                parts = row.sequence.pooled = row.sequence.pooled or PooledParts()
                parts.add(row.start, row.start + row.num_tokens, last, total)
            for committed in self._scheduler.commit(pending.batch, collected.tokens):
                sequence = committed.sequence
                logprobs = collected.logprobs[committed.index]
                if committed.finish_reason == "error":
                    token = collected.tokens[committed.index]
                    self._num_corrupted += token == NOT_A_NUMBER
                    reason, field = _fault(sequence, token)
                    self._refuse(sequence.request.request_id, reason, field)
                    continue
                outputs.append(
                    TokenOutput(
                        request_id=sequence.request.request_id,
                        token_ids=committed.tokens,
                        finish_reason=committed.finish_reason,
                        num_cached_tokens=sequence.num_cached,
                        logprobs=[logprobs] if logprobs and committed.tokens else None,
                        embedding=_embedding(sequence),
                    )
                )
        outputs += self._told
        self._told = []
        idle, now_s = not self._scheduler.has_work, time.monotonic()
        is_due = now_s >= self._stats_due_s
        if outputs or admitted or is_due or (idle and pending is not None):
            stats = None
            if is_due or idle:
                stats = self.stats()
                self._stats_due_s = now_s + STATS_INTERVAL_S
            self._link.send(messages.Outputs(outputs, stats, admitted))

    def _prompt_outputs(self, pending: Pending, collected: Collected) -> list[TokenOutput]:
        """The log-probabilities of prompts that a step brought, one output a request."""
        if not collected.prompt_logprobs:
            return []
        found: dict[str, list[TokenLogprobs]] = {}
        for index, sequence in self._scheduler.commit_scores(pending.batch):
            found.setdefault(sequence.request.request_id, []).append(
                collected.prompt_logprobs[index]
            )
        return [
            TokenOutput(request_id=request_id, token_ids=[], prompt_logprobs=logprobs)
            for request_id, logprobs in found.items()
        ]

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Vocabulary(tokenizer_json, eos_token_ids):
                self._grammars.use_vocabulary(tokenizer_json, eos_token_ids)
            case messages.Submit(request):
                if self._stop_at_s is not None:
                    self._refuse(request.request_id, "the engine is shutting down")
                    return
                grammar = request.sampling.grammar
                try:
                    sequence = self._scheduler.add(request, ready=grammar is None)
                except InvalidRequest as error:
                    self._refuse(request.request_id, error.message, error.field)
                    return
                if grammar is not None:
                    self._compiling.append((sequence, self._grammars.compile(grammar)))
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
            case messages.Inspect():
                compiling = [sequence for sequence, _ in self._compiling]
                state = self._recorder.state(self._scheduler, compiling, self._runner.buckets)
                self._link.send(messages.State(state))
            case messages.Shutdown(grace_s):
                self._stop_at_s = time.monotonic() + grace_s

    def _refuse(self, request_id: str, reason: str, invalid_field: str | None = None) -> None:
        self._told.append(
            TokenOutput(
                request_id=request_id,
                token_ids=[],
                finish_reason="error",
                error=reason,
                invalid_field=invalid_field,
            )
        )

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        idle = not self._scheduler.has_work and self._pending is None
        return idle or time.monotonic() >= self._stop_at_s

    def _patience(self) -> float | None:
        """How long to wait for a message before the next step."""
        if self._pending is not None:
            return 0
        if self._scheduler.has_work:
            waits = len(self._compiling) == len(self._scheduler.sequences)
            return COMPILE_POLL_S if waits else 0
        return None if self._stop_at_s is None else max(0.0, self._stop_at_s - time.monotonic())

    def _abandon(self) -> None:
        """Tells those still running that the engine ends; reads the step in flight so that the
        device is idle."""
        self._read_pending()
        for request_id in list(self._scheduler.sequences):
            self._scheduler.abort(request_id)
            self._refuse(request_id, "the engine is shutting down")
        self._read_pending()
