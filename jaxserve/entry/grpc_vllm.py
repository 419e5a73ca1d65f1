"""vllm.grpc.engine.VllmEngine: vLLM's gRPC service, so that gateways which speak it can sit in
front. Imports no jax.

Tokens in, tokens out: texts, chats and their parsers are the gateway's. What its layout has and
this server doesn't is refused by name.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve import __version__
from jaxserve.entry.embeddings import EmbeddingRequest, embed
from jaxserve.entry.failures import RequestAborted, UnsupportedParameter
from jaxserve.entry.front import Front, Record
from jaxserve.entry.grpc_io import STRUCTURES, Context, optional, read_structure, recorded
from jaxserve.entry.proto import vllm_engine_pb2 as pb
from jaxserve.entry.request_stream import RequestStream
from jaxserve.types import ChosenLogprob, Delta, EngineDead, InvalidRequest, SamplingParams

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
SERVER_TYPE = "jaxserve"
NOT_SERVED = ("mm_inputs", "kv_transfer_params", "kv_transfer_params_json")
ZERO_IS = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1}
"""What fields without presence mean that are 0, where that isn't 0."""
SECTIONS = ("core", "all")
TOKENIZED = {"prompt": "tokenized.input_ids"}
"""What a prompt of tokens is called here, for errors."""


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises: InvalidRequest naming the field."""
    given: dict[str, Any] = {
        "grammar": read_structure(message, "constraint"),
        "temperature": 1.0,
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "logit_bias": {token: shortest(bias) for token, bias in message.logit_bias.items()},
    }
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        name = field.name
        if name in STRUCTURES or field.is_repeated:
            continue
        if field.has_presence and not message.HasField(name):
            continue
        value = getattr(message, name)
        if not value and name in ZERO_IS:
            value = ZERO_IS[name]
        given[name] = shortest(value) if isinstance(value, float) else value
    return SamplingParams(**given)


def shortest(value: float) -> float:
    """The shortest decimal that is this number in float32: 0.01, not 0.00999999977."""
    return float(str(np.float32(value)))


def read_tokens(message: pb.TokenizedInput, field: str) -> list[int]:
    """Raises: InvalidRequest."""
    if not message.input_ids:
        raise InvalidRequest(f"{field}.input_ids", "is empty; allowed: one token or more")
    return list(message.input_ids)


def check_rank(message: pb.GenerateRequest | pb.GetLoadsRequest, field: str) -> None:
    """Raises: InvalidRequest."""
    if optional(message, field) not in (None, 0):
        raise InvalidRequest(field, f"is {getattr(message, field)}; allowed: 0, the only rank")


def write_logprobs(
    tokens: Sequence[ChosenLogprob] | None, num_top: int | None
) -> pb.OutputLogProbs | None:
    """`num_top`: how many were asked for; with 0 there is no list of them."""
    if not tokens:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob for token in tokens],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=[_top(token) for token in tokens] if num_top else (),
    )


def write_prompt_logprobs(stream: RequestStream) -> pb.InputLogProbs | None:
    """None unless they were asked for, and all are there; the first token has none."""
    tokens, num_top = stream.prompt_logprobs or [], stream.params.prompt_logprobs
    if len(tokens) < len(stream.prompt_token_ids):
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=token and token.logprob) for token in tokens],
        token_ids=stream.prompt_token_ids,
        top_logprobs=[_top(token) for token in tokens] if num_top else (),
    )


def _top(token: ChosenLogprob | None) -> pb.TopLogProbs:
    top = () if token is None else token.top
    return pb.TopLogProbs(values=[p for _, _, p in top], token_ids=[i for _, i, _ in top])


def write_chunk(stream: RequestStream, delta: Delta) -> pb.GenerateResponse:
    """What is new of a choice; of the first one, at first, the prompt's log-probabilities too."""
    chunk = pb.GenerateStreamChunk(
        index=delta.index,
        token_ids=delta.token_ids,
        prompt_tokens=len(stream.prompt_token_ids),
        completion_tokens=len(delta.token_ids),
        cached_tokens=stream.choices[delta.index].num_cached_tokens,
        output_logprobs=write_logprobs(delta.logprobs, stream.params.logprobs),
        input_logprobs=None if delta.prompt_logprobs is None else write_prompt_logprobs(stream),
    )
    return pb.GenerateResponse(chunk=chunk)


def write_complete(stream: RequestStream, delta: Delta, has_chunks: bool) -> pb.GenerateResponse:
    """A whole choice, of which `delta` is the last; log-probabilities are in its chunks if it
    has some.
    """
    choice = stream.choices[delta.index]
    complete = pb.GenerateComplete(
        index=delta.index,
        output_ids=choice.token_ids,
        finish_reason=delta.finish_reason or "",
        prompt_tokens=len(stream.prompt_token_ids),
        completion_tokens=len(choice.token_ids),
        cached_tokens=choice.num_cached_tokens,
        output_logprobs=None
        if has_chunks
        else write_logprobs(choice.logprobs, stream.params.logprobs),
        input_logprobs=None if has_chunks else write_prompt_logprobs(stream),
    )
    if isinstance(delta.stop_reason, str):
        complete.matched_stop_str = delta.stop_reason
    elif delta.stop_reason is not None:
        complete.matched_token_id = delta.stop_reason
    return pb.GenerateResponse(complete=complete)


class VllmEngine:
    """The service's methods, see `grpc_io.service_handlers`."""

    def __init__(self, front: Front):
        self._front = front

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        for field in NOT_SERVED:
            if request.HasField(field):
                raise UnsupportedParameter(field, "is not supported by this server")
        check_rank(request, "data_parallel_rank")
        request_id = request.request_id or None
        async with recorded(self._front, context, "grpc vLLM", "gen", request_id) as record:
            prompt = request.text
            record.names = {"prompt": "text"}
            match request.WhichOneof("input"):
                case "tokenized":
                    prompt = read_tokens(request.tokenized, "tokenized")
                    record.names = TOKENIZED
                case None:
                    raise InvalidRequest("input", "is not set; allowed: tokenized or text")
            stream = await record.open(prompt, read_sampling(request.sampling_params), None)
            await self._answer(record, stream, context, request.stream)

    async def _answer(
        self, record: Record, stream: RequestStream, context: Context, has_chunks: bool
    ) -> None:
        seen: set[int] = set()
        ended: list[Delta] = []
        aborted: RequestAborted | None = None
        async for delta in stream:
            try:
                record.note(len(delta.token_ids), delta.finish_reason)
            except RequestAborted as error:  # told by the finish_reason, as the layout has it
                aborted = error
            if has_chunks and (delta.token_ids or delta.index not in seen):
                await context.write(write_chunk(stream, delta))
                seen.add(delta.index)
            if delta.finish_reason is None:
                continue
            if has_chunks:
                await context.write(write_complete(stream, delta, has_chunks))
            else:
                ended.append(delta)
        for delta in ended:  # all is known now, of the prompt too
            await context.write(write_complete(stream, delta, has_chunks))
        if aborted is not None:
            record.fail(aborted)

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        request_id = request.request_id or None
        async with recorded(self._front, context, "grpc vLLM", "embd", request_id) as record:
            record.names = TOKENIZED
            tokens = read_tokens(request.tokenized, "tokenized")
            body = EmbeddingRequest.model_construct(input=[tokens])
            [vector] = await embed(self._front, record, body)
            return pb.EmbedResponse(
                embedding=vector,
                prompt_tokens=record.usage().prompt_tokens,
                embedding_dim=len(vector),
            )
        raise AssertionError("an error ends the call")

    async def health_check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        try:
            self._front.engine()
        except EngineDead as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="ok")

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        for request_id in request.request_ids:
            await self._front.abort(request_id)
        return pb.AbortResponse()

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        engine, info = self._front.engine(), self._front.info
        tokenizer = engine.model.tokenizer
        defaults = msgspec.to_builtins(engine.model.defaults)
        unset = msgspec.to_builtins(SamplingParams())
        stated = {name: value for name, value in defaults.items() if value != unset[name]}
        return pb.GetModelInfoResponse(
            model_path=engine.config.model,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=self._front.model_name,
            tokenizer_path="" if tokenizer is None else engine.config.model,
            model_type=info.model_type,
            eos_token_ids=sorted(engine.model.eos_token_ids),
            bos_token_id=(tokenizer and tokenizer.bos_token_id) or 0,
            max_req_input_len=info.max_request_tokens - 1,
            default_sampling_params_json=msgspec.json.encode(stated).decode() if stated else "",
        )

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._front.num_in_flight,
            last_receive_timestamp=self._front.last_request,
            uptime_seconds=self._front.uptime_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
        )

    async def get_loads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        check_rank(request, "dp_rank")
        for section in request.include:
            if section not in SECTIONS:
                allowed = ", ".join(SECTIONS)
                raise InvalidRequest("include", f"has {section!r}; allowed: {allowed}")
        engine, info = self._front.engine(), self._front.info
        stats = engine.stats()
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=stats.pages_used * info.page_size,
            max_total_num_tokens=info.num_pages * info.page_size,
            token_usage=stats.pages_used / max(1, info.num_pages),
            gen_throughput=engine.generated_per_s(),
            cache_hit_rate=stats.cached_tokens / max(1, stats.prompt_tokens),
            utilization=stats.num_running / info.max_num_seqs,
            max_running_requests=info.max_num_seqs,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[load],
        )
