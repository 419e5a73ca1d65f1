"""Reading requests and writing answers: bodies, errors, server-sent events. Imports no jax.

A client that goes away ends its request, whether it streams or not.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jaxserve.entry.body_fields import Body, parse
from jaxserve.entry.client import Until
from jaxserve.entry.failures import ABORTED, Failure, HttpFailure
from jaxserve.entry.front import Front, Record
from jaxserve.entry.openai_answers import Completion, usage_body
from jaxserve.entry.openai_schema import SamplingBody
from jaxserve.entry.tracing import trace_context
from jaxserve.types import SamplingParams

CLIENT_GONE = "499"
"""What the log says of a request whose client left (nginx's number)."""

encode = msgspec.json.encode


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def begin(front: Front, request: Request, prefix: str, request_id: str | None = None) -> Record:
    """A record of `request`, with an id of its own that begins with `prefix` unless it has one.

    Raises: InvalidRequest for an id that is in flight.
    """
    record = front.begin(f"{request.method} {request.url.path}", prefix, request_id)
    record.client_id = getattr(request.state, "request_id", "")
    record.trace_context = trace_context(request.headers.items())
    return record


def takes(kind: type[Body]) -> dict[str, Any]:
    """What OpenAPI says of an endpoint that reads this body itself."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


async def read[B: Body](request: Request, kind: type[B]) -> B:
    """The request's body, checked.

    Raises: HttpFailure, InvalidRequest; ClientGone if it left while sending.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Also keeps web pages of other origins out: a browser asks before it sends this type.
        raise HttpFailure(415, "content-type is not application/json", "unsupported_media_type")
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    return parse(kind, body)


def json_response(body: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(encode(body), status, headers=headers, media_type="application/json")


def failure_response(failure: Failure, headers: Any = None) -> Response:
    headers = dict(headers or {})
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(failure.retry_after_s)
    if failure.code == ABORTED:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it anew
    return json_response(failure.body, failure.status, headers)


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away.

    The request's body must have been read. Raises: ClientGone, or what `work` raises.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Job(Protocol):
    """A request that has been checked, ready to be sent to the engine and answered."""

    record: Record

    @property
    def streams(self) -> bool:
        """The answer is streamed."""
        ...

    async def open(self) -> None:
        """Sends all of it to the engine. Raises: what is wrong with any part of it."""
        ...

    async def whole(self) -> Any:
        """Runs all of it and returns the answer's body."""
        ...

    def events(self) -> AsyncGenerator[bytes]:
        """The server-sent events of the whole answer, once it is open."""
        ...

    def error_event(self, failure: Failure) -> bytes:
        """What a stream that has begun says of an error."""
        ...


class CompletionJob:
    """One completion request: some prompts with their parameters, and the form of the answer."""

    def __init__(
        self,
        record: Record,
        reply: Completion,
        body: SamplingBody,
        params: SamplingParams,
        prompts: Sequence[str | list[int]],
        until: Callable[[], Until] | None = None,
    ):
        self.record = record
        self.reply = reply
        self.body = body
        self._params = params
        self._prompts = prompts
        self._until = until
        if body.include_usage:
            reply.envelope["usage"] = None

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    def error_event(self, failure: Failure) -> bytes:
        return event(failure.body)

    async def open(self) -> None:
        """Sends all prompts to the engine. Raises: what is wrong with any of them."""
        self.record.user = self.body.user
        for prompt in self._prompts:
            await self.record.open(
                prompt,
                self._params,
                self.body.default_max_tokens,
                self.body.priority or 0,
                until=self._until,
                cache_salt=self.body.cache_salt or "",
            )

    async def whole(self) -> dict[str, Any]:
        """Runs all of it and returns the answer's body."""
        await self.open()
        outputs = await gather([stream.result() for stream in self.record.streams])
        for choice in (choice for output in outputs for choice in output.choices):
            self.record.note(0, choice.finish_reason)
        return self.reply.body(outputs)

    async def events(self) -> AsyncGenerator[bytes]:
        """The server-sent events of the whole answer, once it is open."""
        record, reply, n = self.record, self.reply, self._params.n
        num_choices, num_told = n * len(self._prompts), 0
        if first := reply.first_chunks(num_choices):
            yield b"".join(event(chunk) for chunk in first)
        async with contextlib.aclosing(merge(record.streams)) as deltas:
            async for i, delta in deltas:
                record.note(len(delta.token_ids), delta.finish_reason)
                num_told += len(delta.token_ids)
                if self.body.continuous_usage:
                    reply.envelope["usage"] = usage_body(record.usage(num_told))
                prompt = record.streams[i].prompt_token_ids
                if chunks := reply.chunks(i * n + delta.index, delta, prompt):
                    yield b"".join(event(chunk) for chunk in chunks)
        if self.body.include_usage:
            yield event(reply.usage_chunk(record.usage()))
        yield b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


async def answer(
    request: Request, record: Record, prepare: Callable[[], Awaitable[Job]]
) -> Response:
    """The response to a completion request, whole or streamed, or to what is wrong with it."""

    async def work() -> Response:
        job = await prepare()
        if job.streams:
            await while_connected(request.receive, job.open())
            return EventStream(job)
        return json_response(await while_connected(request.receive, job.whole()))

    return await respond(record, work)


async def respond(record: Record, work: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
    """The response that `work` makes, from reading the body on, or one to what is wrong with it.

    The record ends with it, but for a stream's, which has only begun.
    """
    begun = False
    try:
        response = await work()
        begun = isinstance(response, EventStream)
        if not begun:
            response.headers.update(request_id_header(record))
            record.end(str(response.status_code))
        return response
    except ClientGone:
        record.end(CLIENT_GONE)
        return Response(status_code=499)
    except Exception as error:  # answered; `fail` logs faults of ours
        return failure_response(record.fail(error), request_id_header(record))
    finally:
        if not begun:
            await record.close()
            record.end(CLIENT_GONE)  # cancelled, or it has ended already


def request_id_header(record: Record) -> dict[str, str]:
    return {"x-request-id": record.request_id}


class EventStream(Response):
    """Streams an open job's events. An error now is one more event: the status is out already."""

    def __init__(self, job: Job):
        super().__init__()
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._job.record
        try:
            await while_connected(receive, self._run(send))
        except ClientGone:
            pass
        finally:
            await record.close()
            record.end(CLIENT_GONE)  # unless it has ended already

    async def _run(self, send: Send) -> None:
        record = self._job.record
        headers = {
            **request_id_header(record),
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with contextlib.aclosing(self._job.events()) as events:
                async for data in events:
                    await write(data)
            record.end("200")
        except Exception as error:  # the status is sent: the stream itself tells
            await write(self._job.error_event(record.fail(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gather[T](work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others, and is raised once they have ended."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merge[T](streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of the stream, item) as they come. The first error ends all of them and is raised."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def drain(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                items.put_nowait((index, item))
        finally:
            items.put_nowait(None)

    tasks = [asyncio.ensure_future(drain(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if item is not None:
                yield item
                continue
            running -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
