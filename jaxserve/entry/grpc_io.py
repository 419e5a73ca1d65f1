"""Reading calls and ending them: what the gRPC services have in common. Imports no jax.

A handler writes to its context instead of yielding, so that a cancelled or expired call is
cancelled where it waits for the engine, which frees the request.
"""

import contextlib
import logging
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.entry.failures import Failure, describe
from jaxserve.entry.front import Front, Record
from jaxserve.entry.tracing import trace_context
from jaxserve.types import Grammar, InvalidRequest

log = logging.getLogger("jaxserve.grpc")

REQUEST_ID = re.compile(r"[!-~]{1,128}")
STRUCTURES: dict[str, Callable[[Any, str], Grammar | None]] = {
    "json_schema": Grammar.json_schema,
    "json_object": lambda value, field: Grammar.json_object(field) if value else None,
    "regex": Grammar.regex,
    "choice": lambda value, field: Grammar.choice(list(value.choices), field),
    "grammar": Grammar.grammar,
    "structural_tag": Grammar.structural_tag,
}
"""Of the oneofs that say what a text must look like."""

type Context = grpc.aio.ServicerContext[Any, Any]


class Malformed:
    """Stands for a request whose bytes are no such message; the answer is INVALID_ARGUMENT."""

    def __init__(self, error: Exception):
        self.error = error


def read_message[M: Message](kind: type[M]) -> Callable[[bytes], M | Malformed]:
    """A deserializer that leaves what is malformed to the handler; grpc's own would answer
    INTERNAL.
    """

    def read(data: bytes) -> M | Malformed:
        try:
            return kind.FromString(data)
        except (DecodeError, UnicodeDecodeError) as error:
            return Malformed(error)

    return read


def check_known(message: Message, name: str = "request") -> None:
    """Raises InvalidRequest for a field of a newer or other client, which would be dropped in
    silence otherwise.
    """
    unknown = UnknownFieldSet(message)  # pyright: ignore[reportCallIssue]
    if len(unknown) > 0:
        raise InvalidRequest(name, f"has field number {unknown[0].field_number}, unknown here")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in [value] if isinstance(value, Message) else value:
            if isinstance(one, Message):
                check_known(one, field.name)


def optional(message: Message, name: str) -> Any:
    """The field's value, None when it isn't set."""
    return getattr(message, name) if message.HasField(name) else None


def read_structure(message: Message, oneof: str) -> Grammar | None:
    """The grammar that a oneof of STRUCTURES asks for. Raises: InvalidRequest."""
    name = message.WhichOneof(oneof)
    return None if name is None else STRUCTURES[name](getattr(message, name), name)


def service_handlers(service: ServiceDescriptor, servicer: Any) -> grpc.GenericRpcHandler:
    """The service's methods, for a server. `servicer` has one of the same name, in snake case,
    for each: it takes the request and the context, and returns the answer unless it streams.
    """

    def checked(method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Any]:
        async def handle(request: Message | Malformed, context: Context) -> Any:
            try:
                if isinstance(request, Malformed):
                    raise InvalidRequest("request", f"is malformed: {request.error}")
                check_known(request)
                return await method(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the boundary: every error ends its call with a status
                failure = describe(error)
                if failure.grpc == "INTERNAL":
                    log.error("a call failed", exc_info=error)
                await give_up(context, failure)

        return handle

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        handlers[method.name] = make(
            checked(getattr(servicer, name)),
            request_deserializer=read_message(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


@contextlib.asynccontextmanager
async def recorded(
    front: Front, context: Context, verb: str, prefix: str, request_id: str | None
) -> AsyncIterator[Record]:
    """A record of a call's request, ended with the block; what is raised there ends the call.

    Raises: InvalidRequest for an id that can't be one, or that is in flight.
    """
    if request_id is not None and not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            "request_id", "allowed: 1 to 128 letters, digits and punctuation of ASCII"
        )
    record = front.begin(verb, prefix, request_id)
    record.trace_context = trace_context(context.invocation_metadata() or ())
    try:
        yield record
        record.end("OK")
    except Exception as error:  # the boundary, as above; `fail` logs faults of ours
        await give_up(context, record.fail(error))
    finally:
        await record.close()
        record.end("CANCELLED")  # unless it has ended already


async def give_up(context: Context, failure: Failure) -> typing.NoReturn:
    """Ends the call with the failure's status code."""
    trailers = (
        (("retry-after", str(failure.retry_after_s)),) if failure.retry_after_s is not None else ()
    )
    await context.abort(getattr(grpc.StatusCode, failure.grpc), failure.message, trailers)
