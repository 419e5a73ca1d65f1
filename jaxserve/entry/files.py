"""/v1/files: what clients upload and what batches write, in a folder of the server's. Imports no
jax.

The folder (`files_dir`) holds at most `max_files_bytes`, and outlives the server.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any

import fastapi
from fastapi import Request, Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException

from jaxserve.entry.failures import HttpFailure
from jaxserve.entry.http_io import encode, json_response
from jaxserve.types import InvalidRequest

MAX_FILES = 10_000
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


def replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(path)


class Files:
    """The folder: each file's bytes, and beside them what OpenAI tells of a file, written last."""

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
        replace(self._facts(path), encode(body))
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
        self._facts(path).unlink()
        path.unlink(missing_ok=True)

    def _path(self, file_id: str) -> pathlib.Path:
        path = self._folder / file_id
        if not FILE_ID.fullmatch(file_id) or not self._facts(path).exists():
            raise HttpFailure(404, f"there is no file {file_id[:60]!r}", "file_not_found")
        return path

    @staticmethod
    def _facts(path: pathlib.Path) -> pathlib.Path:
        return path.with_name(f"{path.name}.json")


def page(bodies: Iterable[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A list as OpenAI gives it, by `after` and `limit`. Raises: InvalidRequest."""
    found = list(bodies)
    query = dict(request.query_params)
    limit = query.pop("limit", "20")
    after = query.pop("after", None)
    if not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= 10_000:
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


def add_routes(app: fastapi.FastAPI, files: Files) -> None:
    """Adds the files to the application."""

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
