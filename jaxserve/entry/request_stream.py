"""A request that runs, as its caller reads it, and the text of its choices. Imports no jax."""

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from jaxserve.entry.detokenizer import Detokenizer
from jaxserve.types import (
    Choice,
    ChosenLogprob,
    Delta,
    FinishReason,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
    Usage,
)

MAX_UNREAD = 256
"""Deltas of a request that wait for its reader one by one."""


Until = Callable[[str], bool]
"""Told a text piece by piece, says when no more of it is wanted."""


class Observer(Protocol):
    """Told about each request, for metrics. Calls come from the client's loop; be quick."""

    def on_refused(self) -> None:
        """A request was not taken: as many as may be are in flight."""
        ...

    def on_request_start(self, num_prompt_tokens: int, params: SamplingParams) -> None: ...

    def on_first_token(self, seconds: float) -> None:
        """Since the request's arrival; once per request."""
        ...

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """New tokens of a choice, and the time since its last ones (None: its first)."""
        ...

    def on_request_finish(self, reason: FinishReason, usage: Usage, times: RequestTimes) -> None:
        """Once per started request, however it ends; `reason` is its first choice's."""
        ...


class NoObserver:
    def on_refused(self) -> None:
        pass

    def on_request_start(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        pass

    def on_first_token(self, seconds: float) -> None:
        pass

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        pass

    def on_request_finish(self, reason: FinishReason, usage: Usage, times: RequestTimes) -> None:
        pass


class Backlog:
    """What a reader has not had of a choice, to become one delta."""

    def __init__(self):
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[ChosenLogprob] = []

    def add(self, text: str, token_ids: list[int], logprobs: list[ChosenLogprob] | None) -> None:
        self.pieces.append(text)
        self.token_ids += token_ids
        self.logprobs += logprobs or ()


class ChoiceState:
    """One choice in flight: one Request to the engine. Its stream is the owner."""

    def __init__(
        self,
        stream: "RequestStream",
        index: int,
        wire_id: str,
        detokenizer: Detokenizer | None,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        echo: str = "",
        until: Until | None = None,
    ):
        """`stop_token_ids`: that end it in the engine, the model's own ones included. `echo`: what
        the text begins with, before anything is generated."""
        self.stream = stream
        self.index = index
        self.wire_id = wire_id
        """The choice's name in messages."""
        self.detokenizer = detokenizer
        self.stop_token_ids = stop_token_ids
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self._echo = echo
        self._until = until
        self.group = Backlog()
        """What waits to be streamed until it is `stream_interval` tokens."""
        self.is_streamed = False
        """Something of it was."""
        self.logprobs: list[ChosenLogprob] | None = None
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.last_s: float | None = None
        self.embedding: bytes | None = None

    def take(self, output: TokenOutput) -> tuple[list[int], str]:
        """Adds a step's tokens; returns those that count, and the text that is certain now.

        Sets `finish_reason` at the end, which a stop string may bring before the engine does.
        """
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
        self.embedding = output.embedding
        if self.stream.params.max_tokens == 0:
            self.finish_reason = "length"
            return [], self._add("")
        token_ids, text = output.token_ids, ""
        self.finish_reason = output.finish_reason
        # A stop token counts as generated, but is no text. A grammar may end a text without one.
        ends_in_stop_token = (
            output.finish_reason == "stop"
            and bool(token_ids)
            and token_ids[-1] in self.stop_token_ids
        )
        if ends_in_stop_token and token_ids[-1] in self.stream.params.stop_token_ids:
            self.stop_reason = token_ids[-1]
        if self.detokenizer is not None:
            text = self.detokenizer.push(token_ids[:-1] if ends_in_stop_token else token_ids)
            if self.detokenizer.stop_reason is not None:
                token_ids = token_ids[: self.detokenizer.num_tokens - len(self.token_ids)]
                self.finish_reason = "stop"
                self.stop_reason = self.detokenizer.stop_reason
            elif output.finish_reason is not None:
                text += self.detokenizer.finish()
        if self._until is not None and self._until(text) and self.finish_reason is None:
            self.finish_reason = "stop"
        self.token_ids += token_ids
        return token_ids, self._add(text)

    def finish(self, reason: FinishReason) -> str:
        """Breaks off with the text so far; returns what of it was held back."""
        self.finish_reason = reason
        return self._add(self.detokenizer.finish() if self.detokenizer is not None else "")

    def _add(self, text: str) -> str:
        text, self._echo = self._echo + text, ""
        if text:
            self.pieces.append(text)
        return text

    def choice(self) -> Choice:
        assert self.finish_reason is not None
        return Choice(
            index=self.index,
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
        )


class RequestStream:
    """A request that runs: iterate over its deltas, or await its `result`, not both.

    `aclose` ends the request if it still runs, and so does leaving an `async with` block: one of
    them must happen. Cancelling one `__anext__` alone does not end it.
    Raises while iterating: EngineDead, RequestFailed.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_s: float,
        break_off: Callable[["RequestStream"], None],
        observer: Observer | None = None,
    ):
        """`break_off` ends what still runs of the request, in the engine too."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival_s = arrival_s
        self.queue_s: float | None = None
        """From arrival until a step first computed something of it."""
        self.first_token_s: float | None = None
        """Since arrival."""
        self.choices: list[ChoiceState] = []
        self.observer: Observer = observer or NoObserver()
        self.search: asyncio.Task[None] | None = None
        """What finds its choices by requests of its own (beams, best_of); ends with the stream."""
        self.num_unseen_tokens = 0
        """Generated for choices that are not returned."""
        self.error: Exception | None = None
        self.prompt_logprobs: list[ChosenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in range(1 + params.prompt_logprobs_start)]
        self._told_prompt = params.prompt_logprobs is None
        """Whether a delta has had them."""
        self._accepted = params.grammar is None
        self._break_off = break_off
        self._deltas: collections.deque[Delta] = collections.deque()
        self._backlogs: dict[int, Backlog] = {}
        """By choice. While there is one, all that comes joins it, so that order is kept."""
        self._waiter: asyncio.Future[None] | None = None
        self._collecting = False

    @property
    def finished(self) -> bool:
        return not self.running()

    def running(self) -> list[ChoiceState]:
        return [choice for choice in self.choices if choice.finish_reason is None]

    def usage(self) -> Usage:
        """Of the request so far."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=self.num_unseen_tokens
            + sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=min((choice.num_cached_tokens for choice in self.choices), default=0),
        )

    def times(self) -> RequestTimes:
        """Of the request so far."""
        return RequestTimes(
            total_s=time.monotonic() - self.arrival_s,
            queue_s=self.queue_s,
            first_token_s=self.first_token_s,
            longest=max((len(choice.token_ids) for choice in self.choices), default=0),
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._backlogs:
                return self._take_backlog()
            if self.error is not None:
                raise self.error
            if self.finished:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.popleft()

    async def result(self) -> RequestOutput:
        """The whole request, when it has finished; cancelling this ends it.

        Raises: EngineDead, RequestFailed.
        """
        self._collecting = True
        try:
            while not self.finished:
                await self._wait()
        finally:
            await self.aclose()
        if self.error is not None:
            raise self.error
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            choices=[choice.choice() for choice in self.choices],
            usage=self.usage(),
            prompt_logprobs=self.prompt_logprobs,
        )

    async def accepted(self) -> None:
        """Returns once the engine has taken the request; at once, unless it has a grammar.

        Raises: InvalidRequest for a grammar that can't be followed, EngineDead, RequestFailed.
        """
        while not self._accepted and self.error is None and not self.finished:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        """Ends the request if it still runs. Deltas that were not read are dropped."""
        self.break_off()

    def break_off(self) -> None:
        """What `aclose` does; to be called in the client's loop."""
        self._break_off(self)
        self._deltas.clear()
        self._backlogs.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _wait(self) -> None:
        assert self._waiter is None, "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take_backlog(self) -> Delta:
        index = next(iter(self._backlogs))
        backlog = self._backlogs.pop(index)
        choice = self.choices[index]
        return Delta(
            request_id=self.request_id,
            index=index,
            text="".join(backlog.pieces),
            token_ids=backlog.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=backlog.logprobs if choice.logprobs is not None else None,
            prompt_logprobs=self._tell_prompt(choice),
            usage=self.usage() if self.finished and not self._backlogs else None,
        )

    def _tell_prompt(self, choice: ChoiceState) -> list[ChosenLogprob | None] | None:
        """What a delta says of the prompt: all, with the first delta of the first choice."""
        if self._told_prompt or choice.index > 0:
            return None
        self._told_prompt = True
        return self.prompt_logprobs

    # The client's side

    def add_prompt_logprobs(
        self, logprobs: Sequence[TokenLogprobs], text: Callable[[int], str]
    ) -> None:
        """Takes those of the prompt's next tokens."""
        assert self.prompt_logprobs is not None
        token_ids = self.prompt_token_ids[len(self.prompt_logprobs) :]
        named = self.params.token_ids_logprob
        self.prompt_logprobs += chosen_logprobs(token_ids, logprobs, text, named)

    def accept(self) -> None:
        self._accepted = True
        self.wake()

    def deliver(
        self,
        choice: ChoiceState,
        text: str,
        token_ids: list[int],
        logprobs: list[ChosenLogprob] | None = None,
    ) -> None:
        """Hands the reader what is new of a choice; its last delta tells how the choice ended.

        A reader who is MAX_UNREAD deltas behind gets what comes then in larger pieces, and so does
        one who asked for a `stream_interval`: the first at once, then as many tokens at a time.
        """
        finished = self.finished
        self._accepted = True
        if self._collecting:
            if finished:
                self.wake()
            return
        if (interval := self.params.stream_interval) > 1:
            group = choice.group
            group.add(text, token_ids, logprobs)
            is_due = not choice.is_streamed or len(group.token_ids) >= interval
            if not is_due and choice.finish_reason is None:
                return
            choice.is_streamed = True
            choice.group = Backlog()
            text, token_ids = "".join(group.pieces), group.token_ids
            logprobs = group.logprobs if choice.logprobs is not None else None
        if self._backlogs or len(self._deltas) >= MAX_UNREAD:
            backlog = self._backlogs.setdefault(choice.index, Backlog())
            backlog.add(text, token_ids, logprobs)
            return
        self._deltas.append(
            Delta(
                request_id=self.request_id,
                index=choice.index,
                text=text,
                token_ids=token_ids,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=logprobs,
                prompt_logprobs=self._tell_prompt(choice),
                usage=self.usage() if finished else None,
            )
        )
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def texts(self) -> list[str]:
        """The text of each choice so far."""
        return ["".join(choice.pieces) for choice in self.choices]

    def log_line(self) -> str:
        """How the request went, without its text."""
        usage = self.usage()
        first = "never" if self.first_token_s is None else f"after {self.first_token_s:.3f} s"
        return (
            f"{self.request_id}: {self.choices[0].finish_reason} after "
            f"{time.monotonic() - self.arrival_s:.3f} s, first token {first}; "
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} generated in {len(self.choices)} choices"
        )


def chosen_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    text: Callable[[int], str],
    named: Sequence[int] = (),
) -> list[ChosenLogprob]:
    """Log-probabilities with each token's text; entries beyond `token_ids` are left out. `named`
    are the request's token_ids_logprob."""
    return [
        ChosenLogprob(
            token=text(token_id),
            token_id=token_id,
            logprob=entry.logprob,
            top=[
                (text(other), other, logprob)
                for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
            named=[
                (text(other), other, logprob)
                for other, logprob in zip(named, entry.named, strict=True)
            ],
        )
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]
