"""What a client is told when something fails: one table for both servers, so that they agree.
Imports no jax.
"""

import dataclasses
from typing import Any, Literal

from jaxserve.types import (
    ContextExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestFailed,
)

MAX_MESSAGE = 500
"""Characters of an error message; values that a user sent are quoted in it, and can be long."""


class UnsupportedParameter(InvalidRequest):
    """A parameter that other servers know and this one doesn't, with a value that would matter."""


ABORTED = "request_aborted"
"""The code of a RequestAborted."""


class RequestAborted(RuntimeError):
    """Somebody else ended the request, by the Abort call."""


class Unauthenticated(Exception):
    """The request brings no key, or a wrong one, to a server that wants one."""


class HttpFailure(Exception):
    """A failure of HTTP itself: a body that is no JSON, an unknown path, a wrong method."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


GrpcCode = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "ABORTED",
    "INTERNAL",
]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error as both servers tell it."""

    status: int
    """HTTP status."""
    grpc: GrpcCode
    type: str
    """OpenAI's class of error."""
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def describe(error: BaseException) -> Failure:
    """The failure that a client is told; an error that is nobody's known mistake says nothing of
    its inside.
    """
    message = str(error)
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    match error:
        case ContextExceeded():
            code = "context_length_exceeded"
            return Failure(
                400, "INVALID_ARGUMENT", "invalid_request_error", message, error.field, code
            )
        case ModelNotFound():
            return Failure(
                404, "NOT_FOUND", "invalid_request_error", message, error.field, "model_not_found"
            )
        case InvalidRequest():
            code = "unsupported_parameter" if isinstance(error, UnsupportedParameter) else None
            return Failure(
                400, "INVALID_ARGUMENT", "invalid_request_error", message, error.field, code
            )
        case Unauthenticated():
            code = "invalid_api_key"
            return Failure(401, "UNAUTHENTICATED", "authentication_error", message, code=code)
        case HttpFailure():
            kind = "invalid_request_error"
            return Failure(error.status, "INVALID_ARGUMENT", kind, message, code=error.code)
        case QueueFull():
            return Failure(
                429,
                "RESOURCE_EXHAUSTED",
                "rate_limit_error",
                message,
                code="queue_full",
                retry_after_s=error.retry_after_s,
            )
        case EngineDead():
            code = "engine_unavailable"
            return Failure(503, "UNAVAILABLE", "service_unavailable_error", message, code=code)
        case RequestAborted():
            return Failure(503, "ABORTED", "service_unavailable_error", message, code=ABORTED)
        case RequestFailed():
            return Failure(500, "INTERNAL", "server_error", message, code="request_failed")
        case _:
            return Failure(500, "INTERNAL", "server_error", "internal error; the log has more")
