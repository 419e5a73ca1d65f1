"""What every HTTP request passes before it reaches an endpoint: size limits, keys, its id.

Imports no jax.
"""

import re
import uuid
from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.entry import web_page
from jaxserve.entry.api_keys import ApiKeys
from jaxserve.entry.failures import HttpFailure, Unauthenticated, describe
from jaxserve.entry.http_io import failure_response

MAX_HEADER_BYTES = 32 << 10
"""Of a request's headers together."""
OPEN_PATHS = ("/health", "/metrics", *web_page.OPEN_PATHS)
"""Served without a key: to probes and scrapers, and the page that asks for one."""
OnResponse = Callable[[str, int], None]
"""Called with an endpoint and a status."""
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def guard(
    app: ASGIApp,
    *,
    max_body_bytes: int,
    api_keys: Sequence[str],
    cors_origins: Sequence[str],
    on_response: OnResponse,
) -> ASGIApp:
    """`app` behind its guards; with `cors_origins`, open to web pages of these origins."""
    app = RequestId(KeyCheck(SizeLimits(app, max_body_bytes), api_keys))
    app = Head(Counted(app, on_response))
    if not cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class Head:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def bare(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, bare)


class Counted:
    """Tells of each response its status, and its endpoint: the path with the names of what varies
    in it, "unknown" where it was refused before it came to one. So there are few of either."""

    def __init__(self, app: ASGIApp, on_response: OnResponse):
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("route"), "path", "unknown")
                self._on_response(endpoint, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


class RequestId:
    """Answers with the `X-Request-Id` that the client gave, else the endpoint's, else a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(given):
            given = b""
        scope.setdefault("state", {})["request_id"] = given.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                own = [value for name, value in headers if name == b"x-request-id"]
                headers = [header for header in headers if header[0] != b"x-request-id"]
                name = given or (own[0] if own else uuid.uuid4().hex.encode())
                message = {**message, "headers": [*headers, (b"x-request-id", name)]}
            await send(message)

        await self._app(scope, receive, named)


class KeyCheck:
    """Asks for a key but on OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._keys = ApiKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(dict(scope["headers"]).get(b"authorization", b""))
            except Unauthenticated as error:
                headers = {"www-authenticate": "Bearer"}
                await failure_response(describe(error), headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SizeLimits:
    """Refuses headers over MAX_HEADER_BYTES, and bodies over `max_bytes`: by their Content-Length,
    or when more than that has come.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # What the client still sends is not read, so the connection can't be used again.
        headers = {"connection": "close"}
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            error = HttpFailure(
                431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large"
            )
            await failure_response(describe(error), headers)(scope, receive, send)
            return
        error = HttpFailure(
            413, f"the body is larger than {self._max_bytes} bytes", "request_too_large"
        )
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            await failure_response(describe(error), headers)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise error
            return message

        await self._app(scope, counted, send)
