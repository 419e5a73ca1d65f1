"""What both servers share: the client they serve, its name, which requests run, their log lines,
and draining.

Imports no jax.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.entry.client import Client, Prompt, RequestStream, Until
from jaxserve.entry.failures import Failure, RequestAborted, describe
from jaxserve.entry.tracing import Tracer
from jaxserve.types import (
    EngineDead,
    EngineInfo,
    FinishReason,
    InvalidRequest,
    ModelNotFound,
    Pooling,
    RequestFailed,
    SamplingParams,
    Usage,
)

TELL_S = 1.0
"""How long the callers of requests that were ended may take to hear of it."""

log = logging.getLogger("jaxserve.access")


class Record:
    """One request from its arrival to its end, for its line in the log; never holds its text."""

    def __init__(self, front: "Front", verb: str, request_id: str):
        self.request_id = request_id
        self.verb = verb
        self.created = int(time.time())
        self.user: str | None = None
        """Whom the request says that it is for."""
        self.client_id = ""
        """The client's own name for the request (X-Request-Id)."""
        self.names: Mapping[str, str] = {}
        """What the request calls fields that go by another name inside, for errors."""
        self.trace_context: dict[str, str] = {}
        """Which trace it belongs to, as its headers say."""
        self.streams: list[RequestStream] = []
        self.finish_reasons: list[FinishReason] = []
        self._front = front
        self._arrival_s = time.monotonic()
        self._first_s: float | None = None
        self._ended = False

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        default_max_tokens: int | None,
        priority: int = 0,
        pooling: Pooling | None = None,
        until: Callable[[], Until] | None = None,
        cache_salt: str = "",
    ) -> RequestStream:
        """Sends one of the request's prompts to the engine. Raises: what `Client.open` raises."""
        number = len(self.streams)
        # With a space, which no client's own id has.
        request_id = f"{self.request_id} {number}" if number else self.request_id
        stream = await self._front.engine().open(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            default_max_tokens=default_max_tokens,
            pooling=pooling,
            until=until,
            cache_salt=cache_salt,
        )
        self.streams.append(stream)
        return stream

    async def close(self) -> None:
        """Ends in the engine whatever of the request still runs there."""
        for stream in self.streams:
            await stream.aclose()

    def usage(self, num_told: int | None = None) -> Usage:
        """Of all prompts, so far; with `num_told`, as if these were all generated tokens."""
        usages = [stream.usage() for stream in self.streams]
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in usages),
            completion_tokens=sum(u.completion_tokens for u in usages)
            if num_told is None
            else num_told,
            cached_tokens=sum(u.cached_tokens for u in usages),
        )

    def note(self, num_tokens: int, finish_reason: FinishReason | None) -> None:
        """Told of each delta before it goes out; of a whole choice, with no tokens.

        Raises: RequestAborted, or EngineDead while the server drains, for an end that is no answer.
        """
        if num_tokens and self._first_s is None:
            self._first_s = time.monotonic()
        if finish_reason is None:
            return
        self.finish_reasons.append(finish_reason)
        if finish_reason not in ("stop", "length"):
            if self._front.draining:
                raise EngineDead("the server is shutting down")
            raise RequestAborted("the request was aborted")

    def end(self, status: str, failure: Failure | None = None) -> None:
        """Writes the request's line; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._front.forget(self)
        if self._front.tracer is not None:
            self._front.tracer.trace(self, status, failure)
        fields: dict[str, Any] = {}
        if self.client_id:
            fields["client_id"] = self.client_id
        if self.user is not None:
            fields["user"] = self.user[:60]
        if failure is not None:
            # The parameter's name, not the message: a message quotes what the client sent.
            fields["error"] = failure.code or failure.type
            if failure.param is not None:
                fields["param"] = failure.param[:60]
        if self.finish_reasons:
            fields["finish"] = ",".join(self.finish_reasons[:8])
        if self.streams:
            usage = self.usage()
            fields |= {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens}
            fields["generated"] = usage.completion_tokens
        if self._first_s is not None:
            fields["first"] = round(self._first_s - self._arrival_s, 3)
        fields["total"] = round(self.elapsed_s, 3)
        if self._front.logs_text:
            fields |= self._texts()
        quoted = ("client_id", "user", "param", "prompts", "texts")
        pairs = [f"{k}={v!r}" if k in quoted else f"{k}={v}" for k, v in fields.items()]
        seconds = [f"{pair}s" if pair.startswith(("first=", "total=")) else pair for pair in pairs]
        request = {"verb": self.verb, "request_id": self.request_id, "status": status}
        line = " ".join([*request.values(), *seconds])
        log.info("%s", line, extra={"fields": request | fields})

    def _texts(self) -> dict[str, Any]:
        client = self._front.client
        tokenizer = client and client.model.tokenizer
        if not tokenizer or not self.streams:
            return {}
        prompts = [tokenizer.decode(stream.prompt_token_ids, False) for stream in self.streams]
        return {"prompts": prompts, "texts": [stream.texts() for stream in self.streams]}

    @property
    def model_name(self) -> str:
        return self._front.model_name

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._arrival_s

    def fail(self, error: Exception) -> Failure:
        """Ends the record with what `error` means to a client; an unknown error is logged whole."""
        if isinstance(error, RequestFailed) and self._front.draining:
            error = EngineDead("the server is shutting down")
        if isinstance(error, InvalidRequest) and error.field in self.names:
            error = type(error)(self.names[error.field], error.message)
        failure = describe(error)
        if failure.status == 500:
            log.error("%s %s failed", self.verb, self.request_id, exc_info=error)
        self.end(failure.grpc if self.verb.startswith("grpc") else str(failure.status), failure)
        return failure


class Front:
    """The engine's client as the servers see it. `client` is None while the engine starts anew."""

    def __init__(
        self,
        client: Client,
        model_name: str,
        *,
        logs_text: bool = False,
        tracer: Tracer | None = None,
    ):
        """`logs_text`: each request's line in the log has its prompt and answers."""
        self.client: Client | None = client
        self.logs_text = logs_text
        self.tracer = tracer
        self.info: EngineInfo = client.info
        self.model_name = model_name
        self.started = int(time.time())
        self.last_request = 0.0
        """Unix seconds; 0: none came yet."""
        self.draining = False
        self._running: dict[str, Record] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    @property
    def uptime_s(self) -> float:
        return time.time() - self.started

    def engine(self) -> Client:
        """The client, if it can serve. Raises: EngineDead while there is no engine, and once the
        server drains.
        """
        if self.draining:
            raise EngineDead("the server is shutting down")
        if self.client is None:
            raise EngineDead("the engine is starting")
        self.client.health()
        return self.client

    def check_model(self, name: str | None) -> None:
        """Raises: ModelNotFound unless `name` is the model's, or not given."""
        if name is not None and name != self.model_name:
            raise ModelNotFound("model", f"is {name!r}; served here: {self.model_name!r}")

    def begin(self, verb: str, prefix: str, request_id: str | None = None) -> Record:
        """A record of a request that has just come; its `end` must be called, whatever happens.

        Raises: InvalidRequest if a request of this id is in flight.
        """
        if request_id is not None and request_id in self._running:
            raise InvalidRequest("request_id", f"{request_id!r} is in flight already")
        self.last_request = time.time()
        record = Record(self, verb, request_id or f"{prefix}-{uuid.uuid4().hex}")
        self._running[record.request_id] = record
        self._idle.clear()
        return record

    def forget(self, record: Record) -> None:
        """Called by the record as it ends."""
        del self._running[record.request_id]
        if not self._running:
            self._idle.set()

    def running_ids(self) -> list[str]:
        return list(self._running)

    async def abort(self, request_id: str) -> bool:
        """Ends a request, of either server; its caller is told. False: it isn't running."""
        record = self._running.get(request_id)
        if record is None or self.client is None:
            return False
        aborted = [await self.client.abort(stream.request_id) for stream in record.streams]
        return any(aborted)

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Takes no new requests and waits for those that run.

        Those that still do after `grace_s`, or when `hurry` is set, end with EngineDead.
        """
        self.draining = True
        idle, hurried = (asyncio.ensure_future(event.wait()) for event in (self._idle, hurry))
        try:
            await asyncio.wait(
                (idle, hurried), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if idle.done():
                return
            log.warning("%d requests ran on after the grace period; ended", len(self._running))
            for request_id in list(self._running):
                await self.abort(request_id)
            await asyncio.wait((idle,), timeout=TELL_S)
        finally:
            idle.cancel()
            hurried.cancel()
