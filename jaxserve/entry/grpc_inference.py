"""jaxserve.v1.Inference, the gRPC service of our own. Imports no jax."""

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from jaxserve import __version__
from jaxserve.config import ServerConfig
from jaxserve.entry import chat_format
from jaxserve.entry import openai_schema as schema
from jaxserve.entry.body_fields import parse
from jaxserve.entry.chat import prepare_chat
from jaxserve.entry.client import Until
from jaxserve.entry.embeddings import EmbeddingRequest, embed
from jaxserve.entry.front import Front, Record
from jaxserve.entry.grpc_io import STRUCTURES, Context, optional, read_structure, recorded
from jaxserve.entry.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.types import (
    ChosenLogprob,
    Delta,
    InvalidRequest,
    SamplingParams,
    Usage,
    parse_json,
    to_json,
)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
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


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest naming the field."""
    given = {name: optional(message, name) for name in OPTIONAL_SAMPLING}
    allowed = optional(message, "allowed_token_ids")
    if given["early_stopping"] is not None:
        given["early_stopping"] = EARLY_STOPPING.get(given["early_stopping"])
        if given["early_stopping"] is None:
            raise InvalidRequest("early_stopping", "is a number without a name")
    return schema.sampling_params(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed.ids),
        bad_words=(*message.bad_words, *(tuple(word.ids) for word in message.bad_words_ids)),
        token_ids_logprob=tuple(message.token_ids_logprob),
        grammar=read_structure(message, "structure"),
        stop_regex=tuple(message.stop_regex),
    )


def read_prompt(message: pb.GenerateRequest | pb.Prompt, field: str) -> str | list[int]:
    """Raises: InvalidRequest naming `field`."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest(field, "is not set; allowed: text or tokens")
    return message.text if kind == "text" else list(message.tokens.ids)


def read_chat(request: pb.ChatRequest) -> schema.ChatRequest:
    """The conversation as /v1/chat/completions would be told it, checked as there.

    Raises: InvalidRequest naming the field.
    """
    fields: dict[str, Any] = {
        "messages": [read_chat_message(message) for message in request.messages],
        "tools": [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        "tool_choice": read_tool_choice(request),
        **given(request, "parallel_tool_calls", "separate_reasoning", "include_reasoning"),
    }
    if request.HasField("chat_template_kwargs"):
        fields["chat_template_kwargs"] = read_json(
            request.chat_template_kwargs, "chat_template_kwargs"
        )
    return parse(schema.ChatRequest, to_json(fields, "request").encode())


def read_chat_message(message: pb.Message) -> dict[str, Any]:
    calls = [
        {"id": call.id or None, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    texts = given(message, "content", "name", "reasoning_content", "tool_call_id")
    return {"role": message.role, **texts, "tool_calls": calls or None}


def read_tool(tool: pb.Tool, field: str) -> dict[str, Any]:
    """Raises: InvalidRequest for parameters that are no JSON."""
    function = {"name": tool.name, **given(tool, "description", "strict")}
    if tool.HasField("parameters"):
        function["parameters"] = read_json(tool.parameters, f"{field}.parameters")
    return {"type": "function", "function": function}


def read_json(text: str, field: str) -> Any:
    """Raises: InvalidRequest for what is no JSON, or could not be told on as such."""
    value = parse_json(text, field)
    to_json(value, field)
    return value


def read_tool_choice(request: pb.ChatRequest) -> Any:
    if not request.HasField("tool_choice"):
        return None
    choice = request.tool_choice
    match choice.WhichOneof("choice"):
        case "mode":
            return choice.mode
        case "function":
            return {"type": "function", "function": {"name": choice.function}}
    raise InvalidRequest("tool_choice", "is empty; allowed: mode or function")


def given(message: ProtoMessage, *names: str) -> dict[str, Any]:
    """Those of the fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


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
        response.usage.CopyFrom(write_usage(delta.usage))
    return response


def write_chat_delta(delta: Delta, message: chat_format.Message) -> pb.GenerateResponse:
    """As `write_delta`, with the text as `message` hears it."""
    response = write_delta(delta)
    response.text = ""
    events: list[Event] = message.push(delta.text)
    if delta.finish_reason is not None:
        events += message.finish()
        response.finish_reason = FINISH_REASONS[message.finish_reason(delta.finish_reason)]
    for event in events:
        match event:
            case Content(text):
                response.text += text
            case Reasoning(text):
                response.reasoning_content += text
            case CallStart(index, name):
                call_id = message.calls[index]["id"]
                response.tool_calls.add(index=index, id=call_id, name=name)
            case CallArguments(index, text):
                calls = response.tool_calls
                if not calls or calls[-1].index != index:
                    calls.add(index=index)
                calls[-1].arguments += text
    return response


def write_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _logprob(token: ChosenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=token.token,
        token_id=token.token_id,
        logprob=token.logprob,
        top=[pb.TopLogprob(token=t, token_id=i, logprob=p) for t, i, p in token.top],
        named=[pb.TopLogprob(token=t, token_id=i, logprob=p) for t, i, p in token.named],
    )


class Inference:
    """The service's methods, see `grpc_io.service_handlers`."""

    def __init__(self, front: Front, settings: ServerConfig):
        self._front = front
        self._settings = settings

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with self._recorded("Generate", "gen", request, context) as record:
            prompt = read_prompt(request, "prompt")
            params = read_sampling(request.sampling)
            await self._open(record, request, prompt, params, schema.COMPLETION_MAX_TOKENS)
            await self._stream(record, context, write_delta)

    async def chat(self, request: pb.ChatRequest, context: Context) -> None:
        async with self._recorded("Chat", "chat", request, context) as record:
            record.names = {"prompt": "messages"}
            engine, params = self._front.engine(), read_sampling(request.sampling)
            try:
                body = read_chat(request)
                prompt, params, message, until = await prepare_chat(
                    engine, self._settings, body, params
                )
            except InvalidRequest as error:
                # A function's fields stand in its Tool or ToolCall here.
                raise type(error)(error.field.replace(".function", ""), error.message) from None
            messages = [message() for _ in range(params.n)]
            await self._open(record, request, prompt, params, None, until)
            await self._stream(
                record, context, lambda delta: write_chat_delta(delta, messages[delta.index])
            )

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._recorded("Embed", "embd", request, context) as record:
            prompts = [read_prompt(one, f"input[{i}]") for i, one in enumerate(request.input)]
            names = ("pooling", "normalize", "dimensions", "truncate_prompt_tokens", "user")
            fields = {"input": prompts, **given(request, *names)}
            body = parse(EmbeddingRequest, to_json(fields, "request").encode())
            vectors = await embed(self._front, record, body)
            return pb.EmbedResponse(
                request_id=record.request_id,
                embeddings=[pb.Embedding(values=vector) for vector in vectors],
                usage=write_usage(record.usage()),
            )
        raise AssertionError("an error ends the call")

    @contextlib.asynccontextmanager
    async def _recorded(
        self, verb: str, prefix: str, request: Any, context: Context
    ) -> AsyncIterator[Record]:
        request_id = optional(request, "request_id")
        async with recorded(self._front, context, f"grpc {verb}", prefix, request_id) as record:
            self._front.check_model(optional(request, "model"))
            record.user = optional(request, "user")
            yield record

    async def _open(
        self,
        record: Record,
        request: pb.GenerateRequest | pb.ChatRequest,
        prompt: str | list[int],
        params: SamplingParams,
        default_max_tokens: int | None,
        until: Callable[[], Until] | None = None,
    ) -> None:
        await record.open(
            prompt,
            params,
            default_max_tokens,
            request.priority,
            cache_salt=request.cache_salt,
            until=until,
        )

    async def _stream(
        self, record: Record, context: Context, write: Callable[[Delta], pb.GenerateResponse]
    ) -> None:
        async for delta in record.streams[0]:
            record.note(len(delta.token_ids), delta.finish_reason)
            await context.write(write(delta))

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._front.check_model(optional(request, "model"))
        special = optional(request, "add_special_tokens")
        token_ids = await self._front.engine().tokenize(request.text, special is not False)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        self._front.check_model(optional(request, "model"))
        skip = optional(request, "skip_special_tokens")
        text = await self._front.engine().detokenize(list(request.token_ids), skip is not False)
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        fields = same_fields(pb.GetModelInfoResponse, self._front.info)
        fields["model"] = self._front.model_name
        return pb.GetModelInfoResponse(**fields)

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        engine = self._front.engine()
        fields = same_fields(pb.GetServerInfoResponse, self._front.info)
        fields["model"] = self._front.model_name
        return pb.GetServerInfoResponse(
            **fields,
            version=__version__,
            uptime_s=self._front.uptime_s,
            num_in_flight=self._front.num_in_flight,
            max_in_flight=engine.max_in_flight,
            config=json.dumps(dataclasses.asdict(engine.config)),
        )

    async def get_loads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        engine = self._front.engine()
        return pb.GetLoadsResponse(
            **same_fields(pb.GetLoadsResponse, engine.stats()),
            generated_tokens_per_s=engine.generated_per_s(),
        )

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if bool(request.request_id) == request.abort_all:
            raise InvalidRequest("request_id", "allowed: one of request_id and abort_all")
        ids = self._front.running_ids() if request.abort_all else [request.request_id]
        return pb.AbortResponse(aborted=any([await self._front.abort(one) for one in ids]))

    async def flush_cache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        await self._front.engine().flush_cache()
        return pb.FlushCacheResponse()


def same_fields(kind: type[ProtoMessage], source: Any) -> dict[str, Any]:
    """Values of the message's fields that `source` has under the same names."""
    names = [field.name for field in kind.DESCRIPTOR.fields]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}
