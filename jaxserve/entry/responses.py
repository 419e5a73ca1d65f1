"""/v1/responses: OpenAI's newer form of a chat, with a store of answers. Imports no jax.

A request is turned into one of /v1/chat/completions, and its answer back. Answers are kept in
memory, the latest MAX_STORED of them, for `retrieve`, `cancel` and `previous_response_id`.
"""

import asyncio
import collections
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import fastapi
from fastapi import Request, Response

from jaxserve.config import ServerConfig
from jaxserve.entry.chat_format import ChatFormat, Message
from jaxserve.entry.client import Until
from jaxserve.entry.failures import ABORTED, Failure, HttpFailure
from jaxserve.entry.front import Front, Record
from jaxserve.entry.http_io import (
    CLIENT_GONE,
    answer,
    begin,
    encode,
    failure_response,
    json_response,
    read,
    request_id_header,
    takes,
)
from jaxserve.entry.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from jaxserve.entry.responses_schema import (
    FIELD_NAMES,
    FlatChoice,
    InputItem,
    ResponsesRequest,
    merge_assistant,
)
from jaxserve.types import InvalidRequest, SamplingParams, Usage

MAX_STORED = 1000


class Stored:
    """An answer, done or in the making, and the conversation that it ends."""

    def __init__(self, body: dict[str, Any], conversation: list[dict[str, Any]]):
        self.body = body
        self.conversation = conversation
        """Without the answer until it is complete."""
        self.task: asyncio.Task[None] | None = None
        self.record: Record | None = None


class Store:
    """The latest answers, by id."""

    def __init__(self, most: int = MAX_STORED):
        self._most = most
        self._kept: collections.OrderedDict[str, Stored] = collections.OrderedDict()

    def add(self, stored: Stored) -> None:
        """Makes room by dropping the oldest that are done."""
        self._kept[stored.body["id"]] = stored
        for name in list(self._kept):
            if len(self._kept) <= self._most:
                break
            if self._kept[name].body["status"] not in ("in_progress", "queued"):
                del self._kept[name]

    def get(self, name: str) -> Stored:
        """Raises: HttpFailure (404)."""
        if name not in self._kept:
            raise HttpFailure(404, f"there is no response {name!r}", "response_not_found")
        return self._kept[name]

    def remove(self, name: str) -> None:
        self.get(name)
        del self._kept[name]


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Items:
    """The output items of an answer as its events tell them, with the events that are streamed."""

    def __init__(self, message: Message):
        self._message = message
        self.output: list[dict[str, Any]] = []
        self._open: str | None = None
        self._call = 0
        """The latest call's number."""

    @property
    def is_thinking(self) -> bool:
        return self._open == "reasoning"

    def push(self, text: str) -> list[dict[str, Any]]:
        return self._tell(self._message.push(text))

    def finish(self, status: str) -> list[dict[str, Any]]:
        """`status` of the item that is open: completed or incomplete."""
        return [*self._tell(self._message.finish()), *self._close(status)]

    def _tell(self, events: list[Event]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for event in events:
            kind = {Content: "message", Reasoning: "reasoning"}.get(type(event), "function_call")
            if self._open != kind or isinstance(event, CallStart):
                told += self._close("completed")
                told += self._begin(kind, event)
            told += self._grow(event)
        return told

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _begin(self, kind: str, event: Event) -> list[dict[str, Any]]:
        self._open = kind
        match kind:
            case "message":
                item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": []}
            case "reasoning":
                item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
            case _:
                assert isinstance(event, CallStart)
                self._call = event.index
                call = self._message.calls[event.index]
                item = {"id": _id("fc"), "type": kind, "call_id": call["id"]}
                item |= {"name": event.name, "arguments": ""}
        item["status"] = "in_progress"
        self.output.append(item)
        index = len(self.output) - 1
        told = [_event("output_item.added", output_index=index, item=dict(item))]
        if kind != "function_call":
            part = self._part("")
            item["content"] = [part]
            told.append(
                _event("content_part.added", **self._place(), content_index=0, part=dict(part))
            )
        return told

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _grow(self, event: Event) -> list[dict[str, Any]]:
        item = self.output[-1]
        match event:
            case CallStart():
                return []
            case CallArguments(_, text):
                item["arguments"] += text
                return [_event("function_call_arguments.delta", **self._place(), delta=text)]
            case Content(text) | Reasoning(text):
                item["content"][0]["text"] += text
                more = {"content_index": 0, "delta": text}
                if self._open == "reasoning":
                    return [_event("reasoning_text.delta", **self._place(), **more)]
                return [_event("output_text.delta", **self._place(), **more, logprobs=[])]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item, place, kind = self.output[-1], self._place(), self._open
        is_cut = kind == "function_call" and not self._message.is_whole(self._call)
        item["status"] = "incomplete" if is_cut else status
        self._open = None
        if kind == "function_call":
            arguments = item["arguments"]
            told = [
                _event(
                    "function_call_arguments.done", **place, name=item["name"], arguments=arguments
                )
            ]
        else:
            part = item["content"][0]
            text, more = part["text"], {"content_index": 0}
            if kind == "reasoning":
                told = [_event("reasoning_text.done", **place, **more, text=text)]
            else:
                told = [_event("output_text.done", **place, **more, text=text, logprobs=[])]
            told.append(_event("content_part.done", **place, **more, part=dict(part)))
        index = place["output_index"]
        return [*told, _event("output_item.done", output_index=index, item=dict(item))]


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


class ResponseJob:
    """One /v1/responses, checked."""

    def __init__(
        self,
        record: Record,
        body: ResponsesRequest,
        params: SamplingParams,
        prompt: list[int],
        items: Items,
        stored: Stored,
        store: Store,
        until: Callable[[], Until] | None,
    ):
        self.record = record
        self.stored = stored
        self._body = body
        self._params = params
        self._prompt = prompt
        self._items = items
        self._store = store
        self._until = until
        self._number = 0

    @property
    def streams(self) -> bool:
        return bool(self._body.stream)

    async def open(self) -> None:
        self.record.user = self._body.user
        await self.record.open(self._prompt, self._params, None, until=self._until)
        if self._body.store is not False:
            self._store.add(self.stored)

    async def whole(self) -> dict[str, Any]:
        await self.open()
        await self.finish()
        return self.stored.body

    async def finish(self) -> None:
        """Runs what is open to its end."""
        async with contextlib.aclosing(self._run()) as pieces:
            async for _ in pieces:
                pass

    async def events(self) -> AsyncGenerator[bytes]:
        body = self.stored.body
        yield self._write(_event("created", response=dict(body)))
        yield self._write(_event("in_progress", response=dict(body)))
        async with contextlib.aclosing(self._run()) as pieces:
            async for events in pieces:
                if events:
                    yield b"".join(map(self._write, events))
        yield self._write(_event(self.stored.body["status"], response=self.stored.body))

    async def _run(self) -> AsyncGenerator[list[dict[str, Any]]]:
        """The events of each piece; the stored body is complete after the last."""
        (stream,) = self.record.streams
        reason = "stop"
        num_thought = 0
        try:
            async for delta in stream:
                self.record.note(len(delta.token_ids), delta.finish_reason)
                reason = delta.finish_reason or reason
                events = self._items.push(delta.text)
                num_thought += len(delta.token_ids) if self._items.is_thinking else 0
                yield events
            status = "incomplete" if reason == "length" else "completed"
            yield self._items.finish(status)
            self._complete(status, stream.usage(), num_thought)
        finally:
            if self.stored.body["status"] == "in_progress":  # left, unless `fail` knows better
                self.stored.body["status"] = "cancelled"

    def _complete(self, status: str, usage: Usage, num_thought: int) -> None:
        stored = self.stored
        stored.body["status"] = status
        if status == "incomplete":
            stored.body["incomplete_details"] = {"reason": "max_output_tokens"}
        stored.body["output"] = self._items.output
        stored.body["usage"] = _usage(usage, num_thought)
        answered: list[dict[str, Any]] = []
        for item in self._items.output:
            # A call that was cut short, or is no JSON, is nothing that a template could write.
            with contextlib.suppress(InvalidRequest):
                answered.append(InputItem(**_as_input(item)).template_message("output"))
        stored.conversation = merge_assistant([*stored.conversation, *answered])

    def fail(self, failure: Failure) -> None:
        status = "cancelled" if failure.code == ABORTED else "failed"
        self.stored.body["status"] = status
        if status == "failed":
            code = failure.code or "server_error"
            self.stored.body["error"] = {"code": code, "message": failure.message}

    def error_event(self, failure: Failure) -> bytes:
        self.fail(failure)
        return self._write(_event(_last_event(self.stored.body), response=self.stored.body))

    def _write(self, event: dict[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + encode(numbered) + b"\n\n"


def _last_event(body: dict[str, Any]) -> str:
    return "failed" if body["status"] == "cancelled" else body["status"]


def _as_input(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as the next request would give it back."""
    kept = {k: v for k, v in item.items() if k not in ("status", "summary", "content")}
    if "content" in item:
        kept["content"] = "".join(part["text"] for part in item["content"])
    return kept


def _usage(usage: Usage, num_thought: int) -> dict[str, Any]:
    """`num_thought`: tokens that came while the thinking went on."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": usage.total_tokens,
    }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    """What the text was asked to be, as it was asked."""
    wanted = request.text and request.text.format
    return wanted.model_dump(exclude_none=True, by_alias=True) if wanted else {"type": "text"}


def _new_body(request: ResponsesRequest, model: str, record: Record) -> dict[str, Any]:
    choice = request.tool_choice
    return {
        "id": record.request_id,
        "object": "response",
        "created_at": record.created,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": _format(request)},
        "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def add_routes(app: fastapi.FastAPI, front: Front, settings: ServerConfig) -> None:
    """Adds /v1/responses and its kin to the application."""
    store = Store()
    background: set[asyncio.Task[None]] = set()

    async def make_job(record: Record, body: ResponsesRequest) -> ResponseJob:
        record.names = FIELD_NAMES
        front.check_model(body.model)
        if body.background and (body.stream or body.store is False):
            other = "stream true" if body.stream else "store false"
            raise InvalidRequest("background", f"can't be had with {other}")
        engine = front.engine()
        has_one_call = body.parallel_tool_calls is False
        tools, choice = body.chat_tools(), body.chosen_tool()
        form = ChatFormat(engine, settings, tools, choice, has_one_call=has_one_call)
        params = form.adjust(body.sampling())
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            stored = store.get(body.previous_response_id)
            if stored.body["status"] not in ("completed", "incomplete"):
                raise InvalidRequest("previous_response_id", "names a response that isn't complete")
            before = stored.conversation
        conversation = body.continued(before, engine.tokenizer.chat_template)
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        prompt = await engine.chat_prompt([*system, *conversation], **form.template)
        message = Message(form.parsers(prompt)(), form.id_of_call, has_one_call=has_one_call)
        stored = Stored(_new_body(body, front.model_name, record), conversation)
        stored.record = record
        until = form.until(prompt)
        return ResponseJob(record, body, params, prompt, Items(message), stored, store, until)

    @app.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
    async def create(request: Request) -> Response:
        body = await read(request, ResponsesRequest)
        record = begin(front, request, "resp", _id("resp"))
        if body.background:
            return await in_background(record, body)
        return await answer(request, record, lambda: make_job(record, body))

    async def in_background(record: Record, body: ResponsesRequest) -> Response:
        begun = False
        try:
            job = await make_job(record, body)
            await job.open()
            begun = True
        except Exception as error:  # answered; `fail` logs faults of ours
            return failure_response(record.fail(error), request_id_header(record))
        finally:
            if not begun:
                await record.close()
                record.end(CLIENT_GONE)  # cancelled, or it has ended already

        async def finish() -> None:
            try:
                await job.finish()
                record.end("200")
            except Exception as error:  # nobody awaits the task: the response tells how it ended
                job.fail(record.fail(error))
            finally:
                await record.close()
                record.end(CLIENT_GONE)

        task = asyncio.ensure_future(finish())
        background.add(task)
        task.add_done_callback(background.discard)
        job.stored.task = task
        return json_response(job.stored.body, headers=request_id_header(record))

    @app.get("/v1/responses/{name}")
    async def retrieve(name: str) -> Response:
        return json_response(store.get(name).body)

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> Response:
        stored = store.get(name)
        if not stored.body["background"]:
            raise InvalidRequest("response_id", "names a response that runs in no background")
        if stored.body["status"] == "in_progress" and stored.record is not None:
            await front.abort(stored.record.request_id)
            if stored.task is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([stored.task])
        return json_response(stored.body)

    @app.delete("/v1/responses/{name}")
    async def delete(name: str) -> Response:
        stored = store.get(name)
        if stored.record is not None and stored.body["status"] == "in_progress":
            await front.abort(stored.record.request_id)
        store.remove(name)
        return json_response({"id": name, "object": "response", "deleted": True})
