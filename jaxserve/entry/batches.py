"""/v1/files and /v1/batches: many requests from one file, answered into another. Imports no jax.

Files lie in a folder of the server's (`files_dir`), at most `max_files_bytes` of them. A batch's
lines go through the same endpoints as any request, a few at a time, and wait when the queue is
full. Files outlive the server, batches don't: one that runs when the server ends is forgotten.
"""

import asyncio
import contextlib
import json
import logging
import os
import pathlib
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal

import fastapi
import msgspec
from fastapi import Request, Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.types import ASGIApp, Message

from jaxserve.config import ServerConfig
from jaxserve.entry.body_fields import Body
from jaxserve.entry.failures import HttpFailure
from jaxserve.entry.front import Front
from jaxserve.entry.http_io import encode, json_response, read, takes
from jaxserve.types import InvalidRequest

log = logging.getLogger("jaxserve.batches")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINES = 50_000
MAX_FILES = 10_000
MAX_BATCHES = 1000
"""That are remembered; the oldest that have ended are forgotten."""
LINES_AT_ONCE = 32
RETRY_S = 0.2
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class Files:
    """The folder: each file's bytes, and beside them what OpenAI tells of a file."""

    def __init__(self, folder: pathlib.Path, max_bytes: int):
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Raises: HttpFailure (413) when there is no room."""
        paths = list(self._folder.glob("file-*"))
        used = sum(path.stat().st_size for path in paths)
        if used + len(content) > self._max_bytes or len(paths) >= 2 * MAX_FILES:
            raise HttpFailure(
                413, f"the server's files are full; it keeps {self._max_bytes} bytes", "files_full"
            )
        body = {
            "id": f"file-{uuid.uuid4().hex}",
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        path = self._folder / body["id"]
        path.write_bytes(content)
        self._facts(path).write_bytes(encode(body))
        return body

    def list(self) -> list[dict[str, Any]]:
        """Latest first."""
        bodies = [json.loads(path.read_bytes()) for path in self._folder.glob("file-*.json")]
        return sorted(bodies, key=lambda body: body["created_at"], reverse=True)

    def get(self, file_id: str) -> dict[str, Any]:
        """Raises: HttpFailure (404)."""
        return json.loads(self._facts(self._path(file_id)).read_bytes())

    def content(self, file_id: str) -> bytes:
        """Raises: HttpFailure (404)."""
        return self._path(file_id).read_bytes()

    def remove(self, file_id: str) -> None:
        """Raises: HttpFailure (404)."""
        path = self._path(file_id)
        os.unlink(path)
        os.unlink(self._facts(path))

    def _path(self, file_id: str) -> pathlib.Path:
        path = self._folder / file_id
        if not FILE_ID.fullmatch(file_id) or not path.exists():
            raise HttpFailure(404, f"there is no file {file_id[:60]!r}", "file_not_found")
        return path

    @staticmethod
    def _facts(path: pathlib.Path) -> pathlib.Path:
        return path.with_name(f"{path.name}.json")


class BatchRequest(Body):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a batch's file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Batch:
    """A batch, running or ended; `body` is what OpenAI tells of it."""

    def __init__(self, request: BatchRequest):
        self.body: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "created_at": int(time.time()),
            "expires_at": int(time.time()) + 24 * 3600,
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": request.metadata,
        }
        self.task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.body["status"] in ("completed", "failed", "cancelled")

    def become(self, status: str) -> None:
        self.body["status"] = status
        self.body[f"{status}_at"] = int(time.time())


def parse_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """(a batch's requests, what is wrong with the file's lines)."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()

    def wrong(number: int, message: str) -> None:
        errors.append({"code": "invalid_line", "line": number, "message": message, "param": None})

    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            wrong(number, f"is no request: {error}")
            continue
        if line.url != endpoint:
            wrong(number, f"url is {line.url[:60]!r}; allowed: the batch's endpoint")
        elif line.custom_id in seen:
            wrong(number, f"custom_id {line.custom_id[:60]!r} comes twice")
        elif line.body.get("stream"):
            wrong(number, "body.stream is true; allowed: false")
        seen.add(line.custom_id)
        lines.append(line)
        if len(lines) > MAX_LINES:
            wrong(number, f"is one too many; allowed: {MAX_LINES} requests")
            break
    if not lines and not errors:
        wrong(1, "the file is empty")
    return lines, errors


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[str, Any], str]:
    """Sends a request to the application; (status, body, request id) of what it answers."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": None, "server": None, "state": {},
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    sent, status, pieces, request_id = False, 500, list[bytes](), ""

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # no client that could leave
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(b"".join(pieces) or b"null"), request_id


class Runner:
    """Runs batches over the application."""

    def __init__(self, app: ASGIApp, files: Files):
        self._app = app
        self._files = files

    async def run(self, batch: Batch) -> None:
        """To its end, whatever that is."""
        try:
            await self._run(batch)
        except asyncio.CancelledError:
            if batch.body["status"] != "cancelling":
                raise
            batch.become("cancelled")
        except Exception as error:  # nobody awaits the task: the batch tells how it ended
            message = str(error)
            if not isinstance(error, HttpFailure):
                log.exception("batch %s failed", batch.body["id"])
                message = "internal error"
            batch.body["errors"] = {"object": "list", "data": [{"message": message}]}
            batch.become("failed")

    async def _run(self, batch: Batch) -> None:
        content = await asyncio.to_thread(self._files.content, batch.body["input_file_id"])
        lines, errors = await asyncio.to_thread(parse_lines, content, batch.body["endpoint"])
        if errors:
            batch.body["errors"] = {"object": "list", "data": errors[:100]}
            batch.become("failed")
            return
        counts = batch.body["request_counts"]
        counts["total"] = len(lines)
        batch.become("in_progress")
        answers: dict[int, bytes] = {}
        failures: dict[int, bytes] = {}
        left = iter(enumerate(lines))

        async def work() -> None:
            for index, line in left:
                status, answer, request_id = await self._ask(line)
                text = encode(
                    {
                        "id": f"batch_req_{uuid.uuid4().hex}",
                        "custom_id": line.custom_id,
                        "response": {
                            "status_code": status, "request_id": request_id, "body": answer,
                        },
                        "error": None,
                    }
                )  # fmt: skip
                good = status == 200
                (answers if good else failures)[index] = text
                counts["completed" if good else "failed"] += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(LINES_AT_ONCE, len(lines))):
                    group.create_task(work())
            batch.become("finalizing")
        finally:
            for name, found in (("output", answers), ("error", failures)):
                if found:
                    file = self._files.add(
                        f"{batch.body['id']}_{name}.jsonl", "batch_output", _joined(found)
                    )
                    batch.body[f"{name}_file_id"] = file["id"]
        batch.become("completed")

    async def _ask(self, line: Line) -> tuple[int, dict[str, Any], str]:
        while True:
            answer = await call(self._app, line.url, encode(line.body))
            if answer[0] != 429:
                return answer
            await asyncio.sleep(RETRY_S)


def _joined(found: dict[int, bytes]) -> bytes:
    """Lines in the order of the input."""
    return b"".join(found[index] + b"\n" for index in sorted(found))


def page(bodies: Iterable[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A list as OpenAI gives it, by `after` and `limit`. Raises: InvalidRequest."""
    found = list(bodies)
    query = dict(request.query_params)
    limit = query.pop("limit", "20")
    after = query.pop("after", None)
    if not limit.isdigit() or not 1 <= int(limit) <= 10_000:
        raise InvalidRequest("limit", f"is {limit[:20]!r}; allowed: 1 to 10000")
    purpose = query.pop("purpose", None)
    for name in query:
        raise InvalidRequest(name, "is not a parameter of this endpoint")
    if purpose is not None:
        found = [body for body in found if body.get("purpose") == purpose]
    if after is not None:
        ids = [body["id"] for body in found]
        if after not in ids:
            raise InvalidRequest("after", "names nothing in the list")
        found = found[ids.index(after) + 1 :]
    shown = found[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }


def add_routes(app: fastapi.FastAPI, front: Front, settings: ServerConfig) -> None:
    """Adds files and batches to the application, if the server has a folder for them."""
    if settings.files_dir is None:
        return
    files = Files(pathlib.Path(settings.files_dir), settings.max_files_bytes)
    runner = Runner(app, files)
    batches: dict[str, Batch] = {}

    def find(batch_id: str) -> Batch:
        if batch_id not in batches:
            raise HttpFailure(404, f"there is no batch {batch_id[:60]!r}", "batch_not_found")
        return batches[batch_id]

    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HttpFailure(415, "content-type is not multipart/form-data")
        try:
            form = await request.form(max_files=1, max_fields=8)
        except MultiPartException as error:
            raise HttpFailure(400, f"the form is broken: {error.message}") from None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(form.close)
            file, purpose = form.get("file"), form.get("purpose")
            for name in form:
                if name not in ("file", "purpose"):
                    raise InvalidRequest(name, "is not a parameter of this endpoint")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("file", "is missing; allowed: a file")
            if purpose != "batch":
                raise InvalidRequest("purpose", f"is {str(purpose)[:60]!r}; allowed: batch")
            content = await file.read()
            body = await asyncio.to_thread(files.add, file.filename or "file", "batch", content)
        return json_response(body)

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        return json_response(page(await asyncio.to_thread(files.list), request))

    @app.get("/v1/files/{file_id}")
    async def get_file(file_id: str) -> Response:
        return json_response(files.get(file_id))

    @app.get("/v1/files/{file_id}/content")
    async def file_content(file_id: str) -> Response:
        content = await asyncio.to_thread(files.content, file_id)
        return Response(content, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> Response:
        files.remove(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @app.post("/v1/batches", openapi_extra=takes(BatchRequest))
    async def create(request: Request) -> Response:
        body = await read(request, BatchRequest)
        front.engine()
        if body.endpoint not in ENDPOINTS:
            allowed = ", ".join(ENDPOINTS)
            raise InvalidRequest("endpoint", f"is {body.endpoint!r}; allowed: {allowed}")
        if files.get(body.input_file_id)["purpose"] != "batch":
            raise InvalidRequest("input_file_id", "names a file of another purpose than batch")
        for batch_id in [name for name, one in batches.items() if one.has_ended]:
            if len(batches) >= MAX_BATCHES:
                del batches[batch_id]
        if len(batches) >= MAX_BATCHES:
            raise HttpFailure(429, f"{MAX_BATCHES} batches run already", "batches_full")
        batch = Batch(body)
        batches[batch.body["id"]] = batch
        batch.task = asyncio.ensure_future(runner.run(batch))
        return json_response(batch.body)

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        latest = (batch.body for batch in reversed(batches.values()))
        return json_response(page(latest, request))

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str) -> Response:
        return json_response(find(batch_id).body)

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        batch = find(batch_id)
        if not batch.has_ended and batch.task is not None:
            batch.become("cancelling")
            batch.task.cancel()
            await asyncio.wait([batch.task])
        return json_response(batch.body)
