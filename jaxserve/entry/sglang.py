"""SGLang's own HTTP API: /generate and what its clients ask besides it. Imports no jax.

Names, defaults and shapes are SGLang's; what it has and this server doesn't is refused by name.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any

import fastapi
import pydantic
from fastapi import Request, Response
from pydantic import Field
from pydantic_core import PydanticCustomError

from jaxserve import __version__
from jaxserve.entry.body_fields import (
    TOKEN_IDS,
    Body,
    LogitBias,
    Stop,
    Texts,
    TokenIds,
    check_prompt,
    only,
    sampling_params,
)
from jaxserve.entry.failures import Failure
from jaxserve.entry.front import Front, Record
from jaxserve.entry.http_io import (
    answer,
    begin,
    event,
    gather,
    json_response,
    merge,
    read,
    respond,
    takes,
    while_connected,
)
from jaxserve.entry.openai_answers import LEAST_LOGPROB
from jaxserve.entry.request_stream import RequestStream
from jaxserve.entry.structured import SGLANG_PARAMETERS, grammar_of
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
INPUT_IDS = {
    "anyOf": [TOKEN_IDS, {"type": "array", "items": TOKEN_IDS, "minItems": 1}, {"type": "null"}]
}
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}
"""What SGLang calls fields of SamplingParams; the others have the same name there."""
LOGPROB_NAMES = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
}
"""The same, of those that stand beside sampling_params."""


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
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Added to the logits of token ids.")
    # One of these at the most.
    json_schema: dict[str, Any] | bool | str | None = Field(
        None, description="A JSON schema, also as text; '$$ANY$$': any JSON object."
    )
    regex: str | None = Field(None, description="The text matches this as a whole.")
    ebnf: str | None = Field(None, description="Lark or EBNF.")
    structural_tag: dict[str, Any] | str | None = None
    custom_params: only({}) = None  # pyright: ignore[reportInvalidTypeForm]

    def params(self, **logprobs: Any) -> SamplingParams:
        """Raises: InvalidRequest, naming the field as SamplingParams does."""
        same = (
            "temperature", "top_p", "top_k", "min_p", "stop", "stop_regex", "n", "ignore_eos",
            "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
            "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
        )  # fmt: skip
        fields = {name: name for name in same} | NAMES
        given = {ours: getattr(self, name) for ours, name in fields.items()}
        return sampling_params(
            **given | logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=grammar_of({name: getattr(self, name) for name in SGLANG_PARAMETERS}),
        )


class GenerateRequest(Body):
    """The body of /generate."""

    text: str | Texts | None = None
    input_ids: Annotated[Any, pydantic.WithJsonSchema(INPUT_IDS)] = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    stream: bool | None = None
    rid: str | None = Field(None, description="Name that /abort_request knows it by.")
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(
        None, description="Prompt token from which on there are log-probabilities too; -1: none."
    )
    top_logprobs_num: int | None = None
    token_ids_logprob: TokenIds | None = Field(
        None, description="Log-probabilities of these tokens at each place."
    )
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

    @property
    def prompt_field(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def field_names(self) -> dict[str, str]:
        """What this body calls fields that go by another name inside."""
        own = {name: name for name in SglangSampling.model_fields} | NAMES
        return {
            **{ours: f"sampling_params.{theirs}" for ours, theirs in own.items()},
            **LOGPROB_NAMES,
            "prompt": self.prompt_field,
        }

    @property
    def scores_prompt(self) -> bool:
        return self.logprob_start_len is not None and self.logprob_start_len >= 0

    def prompts(self) -> list[str] | list[list[int]]:
        """Raises: InvalidRequest."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("text", "allowed: one of text and input_ids")
        name = self.prompt_field
        given = getattr(self, name)
        if name == "input_ids" and isinstance(given, str):
            raise InvalidRequest(name, "allowed: token ids, or a list of such lists")
        try:
            return check_prompt(given)
        except PydanticCustomError as error:
            raise InvalidRequest(name, error.message()) from None

    def all_params(self, num_prompts: int) -> list[SamplingParams]:
        """One for each prompt. Raises: InvalidRequest."""
        if self.logprob_start_len is not None and self.logprob_start_len < -1:
            raise InvalidRequest("logprob_start_len", "allowed: -1, the output only, or 0 or more")
        logprobs: dict[str, Any] = {}
        if self.return_logprob:
            count = self.top_logprobs_num or 0
            logprobs = {"logprobs": count, "token_ids_logprob": self.token_ids_logprob}
            if self.scores_prompt:
                logprobs["prompt_logprobs"] = count
                logprobs["prompt_logprobs_start"] = self.logprob_start_len
        else:
            for name in ("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"):
                if getattr(self, name):
                    raise InvalidRequest(name, "needs return_logprob")
            if self.scores_prompt:
                raise InvalidRequest("logprob_start_len", "needs return_logprob")
        bodies = self.sampling_params
        if bodies is None:
            bodies = SglangSampling.model_construct()
        if isinstance(bodies, SglangSampling):
            bodies = [bodies] * num_prompts
        if len(bodies) != num_prompts:
            raise InvalidRequest(
                "sampling_params", f"are {len(bodies)} for {num_prompts} prompts; allowed: as many"
            )
        found = [body.params(**logprobs) for body in bodies]
        if len({params.n for params in found}) > 1:
            raise InvalidRequest("sampling_params.n", "differs between prompts")
        if self.stream and self.scores_prompt and found[0].n > 1:
            # The first choice scores the prompt; the others may end before that is known.
            raise InvalidRequest(
                "sampling_params.n",
                f"is {found[0].n}; allowed with stream and logprob_start_len: 1",
            )
        return found


class AbortRequest(Body):
    rid: str | None = None
    abort_all: bool | None = None


class ScoreRequest(Body):
    """The body of /v1/score."""

    query: str | TokenIds
    items: str | Texts | list[TokenIds] = Field(
        description="One text, or a list of texts or token ids, as the query is."
    )
    label_token_ids: TokenIds = Field(description="Tokens to score at the place after the prompt.")
    apply_softmax: bool | None = Field(
        None, description="Make the scores of an item's labels sum to 1."
    )
    item_first: bool | None = Field(None, description="Put each item before the query.")
    model: str | None = None

    def prompts(self) -> list[Any]:
        """One for each item. Raises: InvalidRequest."""
        query: Any = self.query
        items: list[Any] = [self.items] if isinstance(self.items, str) else self.items
        for name, value in (("items", items), ("label_token_ids", self.label_token_ids)):
            if not value:
                raise InvalidRequest(name, "is empty; allowed: one or more")
        if isinstance(items[0], str) != isinstance(query, str):
            raise InvalidRequest("items", "and query are not both text, or both token ids")
        return [item + query if self.item_first else query + item for item in items]


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
        self.prompt_logprobs: dict[str, Any] | None = None
        """As they are answered; all are known before the first token is."""


class GenerateJob:
    """One /generate, checked."""

    def __init__(
        self,
        record: Record,
        body: GenerateRequest,
        prompts: list[Any],
        params: list[Any],
        text: Callable[[int], str],
    ):
        """`text`: of a token."""
        self.record = record
        self._text = text
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
        for stream, output in zip(self.record.streams, outputs, strict=True):
            prompt_logprobs = self._prompt_logprobs(stream)
            for choice in output.choices:
                self.record.note(0, choice.finish_reason)
                one = Usage(
                    prompt_tokens=output.usage.prompt_tokens,
                    completion_tokens=len(choice.token_ids),
                    cached_tokens=output.usage.cached_tokens,
                )
                found.append(self._answer(choice, one, prompt_logprobs))
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
                if part.prompt_logprobs is None:
                    part.prompt_logprobs = self._prompt_logprobs(part.stream)
                ended = delta.finish_reason is not None
                answer = self._answer(choice, one, part.prompt_logprobs, ended)
                if len(parts) > 1:
                    answer["index"] = part.number
                yield event(answer)
        yield b"data: [DONE]\n\n"

    def error_event(self, failure: Failure) -> bytes:
        return event(failure.body) + b"data: [DONE]\n\n"

    def _answer(
        self, choice: Choice, usage: Usage, prompt_logprobs: dict[str, Any], ended: bool = True
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.record.request_id,
            "finish_reason": finish_reason(choice, usage) if ended else None,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": self.record.elapsed_s,
        }
        if self._body.return_logprob:
            meta |= prompt_logprobs | self._logprobs("output", choice.logprobs or ())
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _prompt_logprobs(self, stream: RequestStream) -> dict[str, list[Any]]:
        """As SGLang has them, none at the place where they start."""
        start = self._body.logprob_start_len
        if start is None or not self._body.scores_prompt:
            return self._logprobs("input", ())
        scored = (stream.prompt_logprobs or [])[start + 1 :]
        found = self._logprobs("input", [token for token in scored if token is not None])
        first = stream.prompt_token_ids[start]
        for name, entries in found.items():
            is_own = name == "input_token_logprobs"
            entries.insert(0, self._entry(self._text(first), first, None) if is_own else None)
        return found

    def _logprobs(self, side: str, tokens: Sequence[ChosenLogprob]) -> dict[str, list[Any]]:
        """`side`: input or output."""
        found: dict[str, list[Any]] = {
            f"{side}_token_logprobs": [self._entry(t.token, t.token_id, t.logprob) for t in tokens]
        }
        if self._body.top_logprobs_num:
            top = [[self._entry(*other) for other in token.top] for token in tokens]
            found[f"{side}_top_logprobs"] = top
        if self._body.token_ids_logprob:
            named = [[self._entry(*other) for other in token.named] for token in tokens]
            found[f"{side}_token_ids_logprobs"] = named
        return found

    def _entry(self, text: str, token_id: int, logprob: float | None) -> list[Any]:
        least = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return [least, token_id, text if self._body.return_text_in_logprobs else None]


def finish_reason(choice: Choice, usage: Usage) -> dict[str, Any]:
    reason: FinishReason = choice.finish_reason
    if reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    matched = choice.stop_reason
    if matched is None and choice.token_ids:
        matched = choice.token_ids[-1]
    return {"type": reason, "matched": matched}


async def score(front: Front, record: Record, body: ScoreRequest) -> dict[str, Any]:
    """Runs a request and returns the answer's body: for each item, each label's probability of
    being the token after the prompt."""
    front.check_model(body.model)
    prompts, most = body.prompts(), front.engine().max_in_flight
    if len(prompts) > most:
        raise InvalidRequest("items", f"has {len(prompts)} items; allowed: at most {most}")
    try:
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            token_ids_logprob=tuple(body.label_token_ids),
        )
        for prompt in prompts:
            await record.open(prompt, params, None)
    except InvalidRequest as error:
        names = {"token_ids_logprob": "label_token_ids", "prompt": f"items[{len(record.streams)}]"}
        raise type(error)(names.get(error.field, error.field), error.message) from None
    outputs = await gather([stream.result() for stream in record.streams])
    scores: list[list[float]] = []
    for [choice] in (output.choices for output in outputs):
        record.note(0, choice.finish_reason)
        assert choice.logprobs is not None
        logprobs = [logprob for _, _, logprob in choice.logprobs[0].named]
        most = max(logprobs) if body.apply_softmax else 0.0
        found = [math.exp(logprob - most) for logprob in logprobs]
        total = sum(found) if body.apply_softmax else 1.0
        scores.append([one / total for one in found])
    tokens = record.usage().prompt_tokens
    return {
        "scores": scores,
        "model": front.model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "object": "scoring",
    }


def add_routes(app: fastapi.FastAPI, front: Front) -> None:
    """Adds SGLang's endpoints to the application."""

    async def generate(request: Request) -> Response:
        body = await read(request, GenerateRequest)
        if body.rid is not None and not REQUEST_ID.fullmatch(body.rid):
            raise InvalidRequest("rid", "allowed: 1 to 128 letters, digits and punctuation")
        try:
            record = begin(front, request, "gen", body.rid)
        except InvalidRequest as error:
            raise InvalidRequest("rid", error.message) from None
        record.names = body.field_names

        async def prepare() -> GenerateJob:
            prompts = body.prompts()
            params = body.all_params(len(prompts))
            most, count = front.engine().max_in_flight, len(prompts) * params[0].n
            if len(prompts) > 1 and count > most:
                asked = f"asks for {count} answers in all; allowed: {most}"
                raise InvalidRequest(body.prompt_field, asked)
            tokenizer = front.engine().model.tokenizer
            text = tokenizer.token_text if tokenizer is not None else lambda _: ""
            return GenerateJob(record, body, prompts, params, text)

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
    async def score_items(request: Request) -> Response:
        record = begin(front, request, "score")

        async def work() -> Response:
            body = await read(request, ScoreRequest)
            found = await while_connected(request.receive, score(front, record, body))
            return json_response(found)

        return await respond(record, work)
