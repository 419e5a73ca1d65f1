"""SGLang's own HTTP API: /generate and what its clients ask besides it. Imports no jax.

Names, defaults and shapes are SGLang's; what it has and this server doesn't is refused by name.
"""

import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import fastapi
import pydantic
from fastapi import Request, Response
from pydantic import FailFast, Field
from pydantic_core import PydanticCustomError

from jaxserve import __version__
from jaxserve.entry.failures import Failure, UnsupportedParameter
from jaxserve.entry.front import Front, Record
from jaxserve.entry.http_io import (
    answer,
    begin,
    event,
    gather,
    json_response,
    merge,
    read,
    takes,
    while_connected,
)
from jaxserve.entry.openai_schema import (
    LEAST_LOGPROB,
    Body,
    Stop,
    TokenIds,
    check_prompt,
    only,
    sampling_params,
)
from jaxserve.entry.request_stream import RequestStream
from jaxserve.types import (
    Choice,
    ChosenLogprob,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    Usage,
)

DEFAULT_MAX_NEW_TOKENS = 128
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class SglangSampling(Body):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = Field(None, description="Most tokens to generate; else 128.")
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="-1: all.")
    min_p: float | None = None
    stop: Stop = ()
    stop_token_ids: TokenIds | None = None
    stop_regex: Stop = ()
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = Field(None, description="Keep the stop string in the text.")
    sampling_seed: int | None = None
    stream_interval: int | None = None
    frequency_penalty: only(0) = None  # pyright: ignore[reportInvalidTypeForm]
    presence_penalty: only(0) = None  # pyright: ignore[reportInvalidTypeForm]
    repetition_penalty: only(1) = None  # pyright: ignore[reportInvalidTypeForm]
    logit_bias: only({}) = None  # pyright: ignore[reportInvalidTypeForm]
    json_schema: only() = None  # pyright: ignore[reportInvalidTypeForm]
    regex: only() = None  # pyright: ignore[reportInvalidTypeForm]
    ebnf: only() = None  # pyright: ignore[reportInvalidTypeForm]
    structural_tag: only() = None  # pyright: ignore[reportInvalidTypeForm]
    custom_params: only({}) = None  # pyright: ignore[reportInvalidTypeForm]

    def params(self, logprobs: int | None) -> SamplingParams:
        """Raises: InvalidRequest, naming the field as SGLang does."""
        names = {
            "max_tokens": "max_new_tokens",
            "min_tokens": "min_new_tokens",
            "include_stop_str_in_output": "no_stop_trim",
            "seed": "sampling_seed",
        }
        same = (
            "temperature", "top_p", "top_k", "min_p", "stop", "stop_regex", "n", "ignore_eos",
            "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
        )  # fmt: skip
        given = {name: getattr(self, names.get(name, name)) for name in (*names, *same)}
        try:
            return sampling_params(
                **given, stop_token_ids=tuple(self.stop_token_ids or ()), logprobs=logprobs
            )
        except InvalidRequest as error:
            name = names.get(error.field, error.field)
            raise InvalidRequest(f"sampling_params.{name}", error.message) from None


class GenerateRequest(Body):
    """The body of /generate."""

    text: str | Annotated[list[str], FailFast()] | None = None
    input_ids: Annotated[Any, pydantic.WithJsonSchema({"type": "array"})] = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    stream: bool | None = None
    rid: str | None = Field(None, description="Name that /abort_request knows it by.")
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    image_data: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    video_data: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    audio_data: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    input_embeds: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    return_hidden_states: only(False) = None  # pyright: ignore[reportInvalidTypeForm]
    lora_path: only() = None  # pyright: ignore[reportInvalidTypeForm]
    session_params: only() = None  # pyright: ignore[reportInvalidTypeForm]
    custom_logit_processor: only() = None  # pyright: ignore[reportInvalidTypeForm]

    @property
    def is_batch(self) -> bool:
        prompts = self.text if self.text is not None else self.input_ids
        return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list | str)

    def prompts(self) -> list[str] | list[list[int]]:
        """Raises: InvalidRequest."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("text", "allowed: one of text and input_ids")
        name = "text" if self.text is not None else "input_ids"
        given = getattr(self, name)
        if name == "input_ids" and isinstance(given, str):
            raise InvalidRequest(name, "allowed: token ids, or a list of such lists")
        try:
            return check_prompt(given)
        except PydanticCustomError as error:
            raise InvalidRequest(name, error.message()) from None

    def all_params(self, count: int) -> list[SamplingParams]:
        """One for each prompt. Raises: InvalidRequest."""
        if self.logprob_start_len not in (None, -1):
            raise UnsupportedParameter(
                "logprob_start_len", "is not supported by this server; allowed: -1, the output only"
            )
        logprobs = None
        if self.return_logprob:
            logprobs = self.top_logprobs_num or 0
        elif self.top_logprobs_num or self.return_text_in_logprobs:
            name = "top_logprobs_num" if self.top_logprobs_num else "return_text_in_logprobs"
            raise InvalidRequest(name, "needs return_logprob")
        bodies = self.sampling_params or SglangSampling.model_construct()
        if isinstance(bodies, SglangSampling):
            bodies = [bodies] * count
        if len(bodies) != count:
            raise InvalidRequest(
                "sampling_params", f"are {len(bodies)} for {count} prompts; allowed: as many"
            )
        found = []
        for body in bodies:
            try:
                found.append(body.params(logprobs))
            except InvalidRequest as error:
                if error.field == "sampling_params.logprobs":
                    raise InvalidRequest("top_logprobs_num", error.message) from None
                raise
        if len({params.n for params in found}) > 1:
            raise InvalidRequest("sampling_params.n", "differs between prompts")
        return found


class AbortRequest(Body):
    rid: str | None = None
    abort_all: bool | None = None


class ScoreRequest(Body):
    """The body of /v1/score."""

    query: str | TokenIds | None = None
    items: str | Annotated[list[str], FailFast()] | list[TokenIds] | None = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: str | None = None


BODIES = (GenerateRequest, AbortRequest, ScoreRequest)


class Part:
    """One choice of one prompt, as it grows."""

    def __init__(self, stream: RequestStream, index: int, number: int):
        self.stream = stream
        self.index = index
        """Among the prompt's choices."""
        self.number = number
        """Among all of the request's."""
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[ChosenLogprob] = []


class GenerateJob:
    """One /generate, checked."""

    def __init__(
        self, record: Record, body: GenerateRequest, prompts: list[Any], params: list[Any]
    ):
        self.record = record
        self._body = body
        self._prompts = prompts
        self._params: list[SamplingParams] = params

    @property
    def streams(self) -> bool:
        return bool(self._body.stream)

    @property
    def _num_choices(self) -> int:
        return self._params[0].n

    async def open(self) -> None:
        for prompt, params in zip(self._prompts, self._params, strict=True):
            priority = self._body.priority or 0
            await self.record.open(prompt, params, DEFAULT_MAX_NEW_TOKENS, priority)

    async def whole(self) -> Any:
        await self.open()
        outputs = await gather([stream.result() for stream in self.record.streams])
        found: list[dict[str, Any]] = []
        for output in outputs:
            for choice in output.choices:
                self.record.note(0, choice.finish_reason)
                one = Usage(
                    prompt_tokens=output.usage.prompt_tokens,
                    completion_tokens=len(choice.token_ids),
                    cached_tokens=output.usage.cached_tokens,
                )
                found.append(self._answer(choice, one))
        return found if self._body.is_batch or self._num_choices > 1 else found[0]

    async def events(self) -> AsyncGenerator[bytes]:
        """Each with all of its choice's text so far, as SGLang's are."""
        n, streams = self._num_choices, self.record.streams
        parts = [Part(s, j, i * n + j) for i, s in enumerate(streams) for j in range(n)]
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for i, delta in deltas:
                self.record.note(len(delta.token_ids), delta.finish_reason)
                part = parts[i * n + delta.index]
                part.text += delta.text
                part.token_ids += delta.token_ids
                part.logprobs += delta.logprobs or ()
                choice = Choice(
                    index=part.index,
                    text=part.text,
                    token_ids=part.token_ids,
                    finish_reason=delta.finish_reason or "stop",
                    stop_reason=delta.stop_reason,
                    logprobs=part.logprobs,
                )
                usage = part.stream.usage()
                one = Usage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=len(part.token_ids),
                    cached_tokens=usage.cached_tokens,
                )
                answer = self._answer(choice, one, ended=delta.finish_reason is not None)
                if len(parts) > 1:
                    answer["index"] = part.number
                yield event(answer)
        yield b"data: [DONE]\n\n"

    def error_event(self, failure: Failure) -> bytes:
        return event(failure.body) + b"data: [DONE]\n\n"

    def _answer(self, choice: Choice, usage: Usage, ended: bool = True) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.record.request_id,
            "finish_reason": finish_reason(choice, usage) if ended else None,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": self.record.elapsed_s,
        }
        if self._body.return_logprob:
            shown = bool(self._body.return_text_in_logprobs)
            tokens = choice.logprobs or []
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                _entry(t.logprob, t.token_id, t.token, shown) for t in tokens
            ]
            if self._body.top_logprobs_num:
                meta["input_top_logprobs"] = []
                meta["output_top_logprobs"] = [
                    [_entry(logprob, id, text, shown) for text, id, logprob in t.top]
                    for t in tokens
                ]
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _entry(logprob: float, token_id: int, text: str, shown: bool) -> list[Any]:
    return [max(logprob, LEAST_LOGPROB), token_id, text if shown else None]


def finish_reason(choice: Choice, usage: Usage) -> dict[str, Any]:
    reason: FinishReason = choice.finish_reason
    if reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    matched = choice.stop_reason
    if matched is None and choice.token_ids:
        matched = choice.token_ids[-1]
    return {"type": reason, "matched": matched}


def add_routes(app: fastapi.FastAPI, front: Front) -> None:
    """Adds SGLang's endpoints to the application."""

    async def generate(request: Request) -> Response:
        body = await read(request, GenerateRequest)
        if body.rid is not None and not REQUEST_ID.fullmatch(body.rid):
            raise InvalidRequest("rid", "allowed: 1 to 128 letters, digits and punctuation")
        record = begin(front, request, "gen", body.rid)

        async def prepare() -> GenerateJob:
            prompts = body.prompts()
            params = body.all_params(len(prompts))
            most, count = front.engine().max_in_flight, len(prompts) * params[0].n
            if len(prompts) > 1 and count > most:
                raise InvalidRequest("text", f"asks for {count} answers in all; allowed: {most}")
            return GenerateJob(record, body, prompts, params)

        return await answer(request, record, prepare)

    app.post("/generate", openapi_extra=takes(GenerateRequest))(generate)
    app.put("/generate", openapi_extra=takes(GenerateRequest))(generate)

    @app.get("/get_model_info")
    async def model_info() -> Response:
        engine = front.engine()
        return json_response(
            {
                "model_path": engine.config.model,
                "tokenizer_path": engine.config.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "model_type": front.info.model_type,
                "served_model_name": front.model_name,
                "max_model_len": front.info.max_model_len,
            }
        )

    @app.get("/get_server_info")
    async def server_info() -> Response:
        engine = front.engine()
        return json_response(
            {
                **dataclasses.asdict(engine.config),
                "served_model_name": front.model_name,
                "version": __version__,
                "engine": front.info,
                "internal_states": [engine.stats()],
            }
        )

    async def flush_cache() -> Response:
        await front.engine().flush_cache()
        return Response("Cache flushed.\n", media_type="text/plain")

    app.get("/flush_cache")(flush_cache)
    app.post("/flush_cache")(flush_cache)

    @app.post("/abort_request", openapi_extra=takes(AbortRequest))
    async def abort(request: Request) -> Response:
        body = await read(request, AbortRequest)
        if not body.abort_all and not body.rid:
            raise InvalidRequest("rid", "is missing; allowed: a request's, or abort_all")
        for request_id in front.running_ids() if body.abort_all else [body.rid or ""]:
            await front.abort(request_id)
        return Response(status_code=200)

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Healthy is what can generate a token, not only answer."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

        async def one_token() -> None:
            stream = await front.engine().open([0], params, queue="wait")
            await stream.result()

        await request.body()
        await while_connected(request.receive, one_token())
        return Response(status_code=200)

    @app.post("/v1/score", openapi_extra=takes(ScoreRequest))
    async def score(request: Request) -> Response:
        await read(request, ScoreRequest)
        raise UnsupportedParameter(
            "label_token_ids", "is not supported: the engine has no log-probabilities of given ids"
        )
