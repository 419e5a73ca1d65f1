"""The gRPC server: jaxserve.v1, and the standard health and reflection services. Imports no jax.

A handler writes to its context instead of yielding, so that a cancelled or expired call is
cancelled where it waits for the engine, which frees the request.
"""

import logging
import re
import typing
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from jaxserve.entry.client import RequestStream
from jaxserve.entry.failures import Failure, describe
from jaxserve.entry.front import Front, Record
from jaxserve.entry.openai_schema import COMPLETION_MAX_TOKENS, ChatMessage, sampling_params
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.tracing import trace_context
from jaxserve.types import ChosenLogprob, Delta, Grammar, InvalidRequest, SamplingParams

log = logging.getLogger("jaxserve.grpc")

SERVICE = "jaxserve.v1.Inference"
ROLES = ("system", "developer", "user", "assistant")
FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
STRUCTURES: dict[str, Callable[[Any, str], Grammar | None]] = {
    "json_schema": Grammar.json_schema,
    "json_object": lambda value, field: Grammar.json_object(field) if value else None,
    "regex": Grammar.regex,
    "choice": lambda value, field: Grammar.choice(list(value.choices), field),
    "grammar": Grammar.grammar,
    "structural_tag": Grammar.structural_tag,
}
"""Of the oneof `structure`."""

EARLY_STOPPING = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
OPTIONAL_SAMPLING = tuple(
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None and field.name not in STRUCTURES
)
REQUEST_ID = re.compile(r"[!-~]{1,128}")

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


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest naming the field."""
    given = {name: optional(message, name) for name in OPTIONAL_SAMPLING}
    allowed = optional(message, "allowed_token_ids")
    structure = message.WhichOneof("structure")
    if given["early_stopping"] is not None:
        given["early_stopping"] = EARLY_STOPPING.get(given["early_stopping"])
        if given["early_stopping"] is None:
            raise InvalidRequest("early_stopping", "is a number without a name")
    return sampling_params(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed.ids),
        bad_words=(*message.bad_words, *(tuple(word.ids) for word in message.bad_words_ids)),
        token_ids_logprob=tuple(message.token_ids_logprob),
        grammar=structure and STRUCTURES[structure](getattr(message, structure), structure),
        stop_regex=tuple(message.stop_regex),
    )


def write_delta(delta: Delta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=delta.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[_logprob(token) for token in delta.logprobs or ()],
        prompt_logprobs=[_logprob(token) for token in delta.prompt_logprobs or () if token],
    )
    if delta.finish_reason is not None:
        response.finish_reason = FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        response.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        response.stop_token_id = delta.stop_reason
    if delta.usage is not None:
        response.usage.prompt_tokens = delta.usage.prompt_tokens
        response.usage.completion_tokens = delta.usage.completion_tokens
        response.usage.cached_tokens = delta.usage.cached_tokens
    return response


def _logprob(token: ChosenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=token.token,
        token_id=token.token_id,
        logprob=token.logprob,
        top=[pb.TopLogprob(token=t, token_id=i, logprob=p) for t, i, p in token.top],
        named=[pb.TopLogprob(token=t, token_id=i, logprob=p) for t, i, p in token.named],
    )


class Inference:
    """The methods of jaxserve.v1.Inference; each is given its request parsed and checked for
    unknown fields.
    """

    def __init__(self, front: Front):
        self._front = front

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async def start(record: Record) -> RequestStream:
            self._front.check_model(optional(request, "model"))
            kind = request.WhichOneof("prompt")
            if kind is None:
                raise InvalidRequest("prompt", "is not set; allowed: text or tokens")
            prompt = request.text if kind == "text" else list(request.tokens.ids)
            params = read_sampling(request.sampling)
            return await record.open(prompt, params, COMPLETION_MAX_TOKENS, request.priority)

        await self._stream("grpc Generate", "gen", request, context, start)

    async def chat(self, request: pb.ChatRequest, context: Context) -> None:
        async def start(record: Record) -> RequestStream:
            self._front.check_model(optional(request, "model"))
            if not request.messages:
                raise InvalidRequest("messages", "is empty; allowed: at least one")
            messages: list[dict[str, str]] = []
            for i, message in enumerate(request.messages):
                if message.role not in ROLES:
                    allowed = ", ".join(ROLES)
                    raise InvalidRequest(
                        f"messages[{i}].role", f"is {message.role!r}; allowed: {allowed}"
                    )
                # Checked above: its type is a union of literals, which pyright can't see.
                role: Any = message.role
                checked = ChatMessage.model_construct(role=role, content=message.content)
                messages.append(checked.template_message())
            params = read_sampling(request.sampling)
            prompt = await self._front.engine().chat_prompt(messages)
            return await record.open(prompt, params, None, request.priority)

        await self._stream("grpc Chat", "chat", request, context, start)

    async def _stream(
        self,
        verb: str,
        prefix: str,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        start: Callable[[Record], Awaitable[RequestStream]],
    ) -> None:
        request_id = optional(request, "request_id")
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest(
                "request_id", "allowed: 1 to 128 letters, digits and punctuation of ASCII"
            )
        record = self._front.begin(verb, prefix, request_id)
        record.trace_context = trace_context(context.invocation_metadata() or ())
        try:
            async for delta in await start(record):
                record.note(len(delta.token_ids), delta.finish_reason)
                await context.write(write_delta(delta))
            record.end("OK")
        except Exception as error:
            await give_up(context, record.fail(error))
        finally:
            await record.close()
            record.end("CANCELLED")  # unless it has ended already

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=await self._front.abort(request.request_id))

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        info = self._front.info
        names = {field.name for field in pb.GetModelInfoResponse.DESCRIPTOR.fields} - {"model"}
        return pb.GetModelInfoResponse(
            model=self._front.model_name, **{name: getattr(info, name) for name in names}
        )

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._front.check_model(optional(request, "model"))
        special = optional(request, "add_special_tokens")
        token_ids = await self._front.engine().tokenize(
            request.text, add_special_tokens=True if special is None else special
        )
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        self._front.check_model(optional(request, "model"))
        text = await self._front.engine().detokenize(list(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods, for a server."""

        def checked(method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Any]:
            async def handle(request: Message | Malformed, context: Context) -> Any:
                try:
                    if isinstance(request, Malformed):
                        raise InvalidRequest("request", f"is malformed: {request.error}")
                    check_known(request)
                    return await method(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    failure = describe(error)
                    if failure.grpc == "INTERNAL":
                        log.error("a call failed", exc_info=error)
                    await give_up(context, failure)

            return handle

        methods = {
            "Generate": (self.generate, pb.GenerateRequest, pb.GenerateResponse),
            "Chat": (self.chat, pb.ChatRequest, pb.GenerateResponse),
            "Abort": (self.abort, pb.AbortRequest, pb.AbortResponse),
            "GetModelInfo": (
                self.get_model_info,
                pb.GetModelInfoRequest,
                pb.GetModelInfoResponse,
            ),
            "Tokenize": (self.tokenize, pb.TokenizeRequest, pb.TokenizeResponse),
            "Detokenize": (self.detokenize, pb.DetokenizeRequest, pb.DetokenizeResponse),
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, (method, kind, answer) in methods.items():
            streams = name in ("Generate", "Chat")
            make = (
                grpc.unary_stream_rpc_method_handler
                if streams
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[name] = make(
                checked(method),
                request_deserializer=read_message(kind),
                response_serializer=answer.SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def give_up(context: Context, failure: Failure) -> typing.NoReturn:
    """Ends the call with the failure's status code."""
    trailers = (
        (("retry-after", str(failure.retry_after_s)),) if failure.retry_after_s is not None else ()
    )
    await context.abort(getattr(grpc.StatusCode, failure.grpc), failure.message, trailers)


class GrpcServer:
    """A gRPC server that is bound, and answers once started."""

    def __init__(self, front: Front, host: str, port: int, max_message_bytes: int):
        """Binds the port; 0 is a free one. Raises: OSError if it is taken."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((Inference(front).handlers(),))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"gRPC can't listen on {address}: {error}") from None

    async def start(self) -> None:
        await self._server.start()
        await self.set_healthy(True)

    async def set_healthy(self, healthy: bool) -> None:
        """What the health service says from now on, to watchers too."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if healthy else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and ends those that still run after `grace_s`."""
        await self._server.stop(grace_s)
