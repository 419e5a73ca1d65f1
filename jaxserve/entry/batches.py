"""/v1/batches: many requests from one file, answered into another. Imports no jax.

A batch's lines go through the same endpoints as any request, a few at a time, and wait when the
queue is full and while the engine starts anew. What a batch has come to lies beside the files and
outlives the server; one that runs when the server ends has failed, and keeps the answers that it
had when that was in order.
"""

import asyncio
import json
import logging
import pathlib
import time
import uuid
from typing import Any, Literal, Self

import fastapi
import msgspec
from fastapi import Request, Response
from starlette.types import ASGIApp, Message

from jaxserve.config import ServerConfig
from jaxserve.entry import files
from jaxserve.entry.body_fields import Body
from jaxserve.entry.failures import ABORTED, HttpFailure
from jaxserve.entry.front import Front
from jaxserve.entry.http_io import encode, json_response, read, takes
from jaxserve.types import InvalidRequest, load_json

log = logging.getLogger("jaxserve.batches")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINES = 50_000
MAX_BATCHES = 1000
"""That are remembered; the oldest that have ended are forgotten."""
LINES_AT_ONCE = 32
RETRY_S = 0.2
SERVER_ENDED = "the server ended before the batch did"


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
    """A batch, running or ended; `body` is what OpenAI tells of it, also on disk."""

    def __init__(self, body: dict[str, Any], path: pathlib.Path):
        self.body = body
        self.path = path
        self.task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, request: BatchRequest, folder: pathlib.Path) -> Self:
        """A new one."""
        body: dict[str, Any] = {
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
        batch = cls(body, folder / f"{body['id']}.json")
        batch.save()
        return batch

    @property
    def has_ended(self) -> bool:
        return self.body["status"] in ("completed", "failed", "cancelled")

    def become(self, status: str) -> None:
        self.body["status"] = status
        self.body[f"{status}_at"] = int(time.time())
        self.save()

    def fail(self, *errors: dict[str, Any]) -> None:
        self.body["errors"] = {"object": "list", "data": errors}
        self.become("failed")

    def save(self) -> None:
        files.replace(self.path, encode(self.body))


def load(folder: pathlib.Path) -> dict[str, Batch]:
    """The batches of the servers that had the folder before, by id, oldest first."""
    found = [Batch(json.loads(path.read_bytes()), path) for path in folder.glob("batch_*.json")]
    for batch in found:
        if not batch.has_ended:
            batch.fail({"message": SERVER_ENDED})
    return {batch.body["id"]: batch for batch in sorted(found, key=lambda b: b.body["created_at"])}


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
            load_json(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            wrong(number, f"is no request: {error}")
            continue
        if line.url != endpoint:
            wrong(number, f"url is {line.url[:60]!r}; allowed: the batch's endpoint")
        elif line.custom_id in seen:
            wrong(number, f"custom_id {line.custom_id[:60]!r} comes twice")
        for field in ("stream", "background"):  # whose answers come later, or in parts
            if line.body.get(field):
                wrong(number, f"body.{field} is true; allowed: false")
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

    def __init__(self, app: ASGIApp, front: Front, stored: files.Files):
        self._app = app
        self._front = front
        self._files = stored

    async def run(self, batch: Batch) -> None:
        """To its end, whatever that is."""
        try:
            await self._run(batch)
        except asyncio.CancelledError:
            if batch.body["status"] != "cancelling":
                batch.fail({"message": SERVER_ENDED})
                raise
            batch.become("cancelled")
        except Exception as error:  # nobody awaits the task: the batch tells how it ended
            message = str(error)
            if not isinstance(error, HttpFailure):
                log.exception("batch %s failed", batch.body["id"])
                message = "internal error"
            batch.fail({"message": message})

    async def _run(self, batch: Batch) -> None:
        content = await asyncio.to_thread(self._files.content, batch.body["input_file_id"])
        lines, errors = await asyncio.to_thread(parse_lines, content, batch.body["endpoint"])
        if errors:
            batch.fail(*errors[:100])
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
                if status == 503 and self._front.draining:  # what is left is nobody's answer
                    return
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
        finally:
            for name, found in (("output", answers), ("error", failures)):
                if found:
                    file = self._files.add(
                        f"{batch.body['id']}_{name}.jsonl", "batch_output", _joined(found)
                    )
                    batch.body[f"{name}_file_id"] = file["id"]
        if counts["completed"] + counts["failed"] < counts["total"]:
            batch.fail({"message": SERVER_ENDED})
            return
        batch.become("completed")

    async def _ask(self, line: Line) -> tuple[int, dict[str, Any], str]:
        while True:
            answer = await call(self._app, line.url, encode(line.body))
            status, body, _ = answer
            is_aborted = status == 503 and body["error"]["code"] == ABORTED
            if status not in (429, 503) or is_aborted or self._front.draining:
                return answer
            await asyncio.sleep(RETRY_S)


def _joined(found: dict[int, bytes]) -> bytes:
    """Lines in the order of the input."""
    return b"".join(found[index] + b"\n" for index in sorted(found))


async def no_folder(request: Request) -> Response:
    """Answers for files and batches. Raises: HttpFailure (404)."""
    reason = "the server runs without --files-dir FOLDER, which files and batches need"
    raise HttpFailure(404, f"there is no {request.url.path}: {reason}", "files_off")


def add_routes(app: fastapi.FastAPI, front: Front, settings: ServerConfig) -> None:
    """Adds files and batches to the application; without a folder for them, what says so."""
    if settings.files_dir is None:
        for path in ("/v1/files", "/v1/batches"):
            app.add_route(path, no_folder, ["GET", "POST"])
            app.add_route(f"{path}/{{rest:path}}", no_folder, ["GET", "POST", "DELETE"])
        return
    folder = pathlib.Path(settings.files_dir)
    stored = files.Files(folder, settings.max_files_bytes)
    files.add_routes(app, stored)
    runner = Runner(app, front, stored)
    batches = load(folder)

    def find(batch_id: str) -> Batch:
        if batch_id not in batches:
            raise HttpFailure(404, f"there is no batch {batch_id[:60]!r}", "batch_not_found")
        return batches[batch_id]

    @app.post("/v1/batches", openapi_extra=takes(BatchRequest))
    async def create(request: Request) -> Response:
        body = await read(request, BatchRequest)
        front.engine()
        if body.endpoint not in ENDPOINTS:
            allowed = ", ".join(ENDPOINTS)
            raise InvalidRequest("endpoint", f"is {body.endpoint!r}; allowed: {allowed}")
        if stored.get(body.input_file_id)["purpose"] != "batch":
            raise InvalidRequest("input_file_id", "names a file of another purpose than batch")
        for batch_id in [name for name, one in batches.items() if one.has_ended]:
            if len(batches) >= MAX_BATCHES:
                batches.pop(batch_id).path.unlink(missing_ok=True)
        if len(batches) >= MAX_BATCHES:
            raise HttpFailure(429, f"{MAX_BATCHES} batches run already", "batches_full")
        batch = Batch.of(body, folder)
        batches[batch.body["id"]] = batch
        batch.task = asyncio.ensure_future(runner.run(batch))
        return json_response(batch.body)

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        latest = (batch.body for batch in reversed(batches.values()))
        return json_response(files.page(latest, request))

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
