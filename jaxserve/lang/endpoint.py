"""Programs on a jaxserve server, over HTTP. Imports no jax."""

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.loop_thread import end_loop
from jaxserve.entry.sglang import NAMES, SglangSampling
from jaxserve.lang.backend import Backend, Generated, Scored, text_ids
from jaxserve.types import (
    ChosenLogprob,
    EngineDead,
    Grammar,
    InvalidRequest,
    RequestFailed,
    SamplingParams,
    Usage,
    to_json,
)

GRAMMARS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "json_object": "json_schema",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""What /generate calls each kind of grammar."""
ANY_OBJECT = "$$ANY$$"
CONNECT_S = 10.0


class RuntimeEndpoint(Backend):
    """A server that programs run on; the steps of all that use it batch together there.

    It is asked by its /generate, /tokenize and /tokenizer_info. `close` ends what still runs, and
    so does leaving a `with` block.
    """

    def __init__(self, url: str, *, api_key: str | None = None):
        """Raises: EngineDead if nobody answers there, InvalidRequest if it is no such server."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        http = self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),  # as many as there are programs
        )
        super().__init__()
        self._finalizer = weakref.finalize(self, end_loop, self.loop, http.aclose)
        try:
            info = self.loop.run(self._ask("GET", "/tokenizer_info"))
        except BaseException:
            self._finalizer()
            raise
        tokens = {name: info[name] for name in info if name.endswith("_token")}
        source = info["chat_template"]
        self._chat_template = None if source is None else ChatTemplate(source, **tokens)
        self._joins_tokens = not info["strips_first_space"]
        self._eos_token_ids = frozenset(info["eos_token_ids"])

    def close(self) -> None:
        self._finalizer()

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._chat_template

    @property
    def joins_tokens(self) -> bool:
        return self._joins_tokens

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return (await self._ask("POST", "/tokenize", body))["tokens"]

    async def generate(
        self, token_ids: list[int], params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> Generated:
        body = {"input_ids": token_ids, **sampling_body(params)}
        if on_text is None:
            answer = await self._ask("POST", "/generate", body)
        else:
            answer, length = {}, 0
            async for answer in self._events("/generate", {**body, "stream": True}):
                on_text(answer["text"][length:])
                length = len(answer["text"])
        meta, output_ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            raise RequestFailed("the request was aborted")
        stop_reason = meta["finish_reason"].get("matched")
        if not isinstance(stop_reason, str) and stop_reason not in params.stop_token_ids:
            stop_reason = None
        ends = self._eos_token_ids.union(params.stop_token_ids)
        return Generated(
            text=answer["text"],
            text_ids=text_ids(output_ids, reason, stop_reason, ends),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=_usage(meta),
            logprobs=_logprobs(meta) if "output_token_logprobs" in meta else None,
        )

    async def score(
        self, prompts: list[list[int]], start: int, named: Sequence[int]
    ) -> list[Scored]:
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": start,
            "token_ids_logprob": list(named),
        }
        return [
            Scored(
                [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]],
                [entry[0] for entry in answer["meta_info"]["output_token_ids_logprobs"][0]],
                _usage(answer["meta_info"]),
            )
            for answer in await self._ask("POST", "/generate", body)
        ]

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's body; waits where the server is full. Raises: as `generate`."""
        while True:
            try:
                response = await self._http.request(method, path, **_content(body))
            except httpx.HTTPError as error:
                raise EngineDead(f"{self._http.base_url}: {error!r}") from error
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            await _pause(response)
        _check(response)
        return response.json()

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events of a streamed answer. Raises: as `generate`."""
        try:
            while True:
                async with self._http.stream("POST", path, **_content(body)) as response:
                    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                        await _pause(response)
                        continue
                    if response.is_error:
                        await response.aread()
                        _check(response)
                    async for line in response.aiter_lines():
                        data = line.removeprefix("data: ")
                        if not data or data == "[DONE]":
                            continue
                        event = json.loads(data)
                        if "error" in event:
                            raise RequestFailed(event["error"]["message"])
                        yield event
                    return
        except httpx.HTTPError as error:
            raise EngineDead(f"{self._http.base_url}: {error!r}") from error


def _content(body: Mapping[str, Any] | None) -> dict[str, Any]:
    """What httpx sends of a body of JSON. Raises: InvalidRequest for text that is no Unicode."""
    if body is None:
        return {}
    headers = {"content-type": "application/json"}
    return {"content": to_json(body, "prompt").encode(), "headers": headers}


async def _pause(response: httpx.Response) -> None:
    await asyncio.sleep(float(response.headers.get("retry-after", 1)))


def _check(response: httpx.Response) -> None:
    """Raises: the error that the server tells of."""
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = response.text[:500], None, None
    match response.status_code:
        case httpx.codes.SERVICE_UNAVAILABLE if code != "request_aborted":
            raise EngineDead(message)
        case status if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise RequestFailed(message)
    field = param or response.request.url.path
    raise InvalidRequest(field, message.removeprefix(f"{param}: "))


def sampling_body(params: SamplingParams) -> dict[str, Any]:
    """The fields of /generate that ask for `params`.

    Raises: InvalidRequest for what it has no field for.
    """
    sampling: dict[str, Any] = {}
    body: dict[str, Any] = {"sampling_params": sampling}
    defaults = SamplingParams()
    for field in params.__struct_fields__:
        value = getattr(params, field)
        if value == getattr(defaults, field):
            continue
        name = NAMES.get(field, field)
        if isinstance(value, Grammar):
            if value.kind not in GRAMMARS:
                raise InvalidRequest(value.field, f"{value.kind} is not served by an endpoint")
            text = ANY_OBJECT if value.kind == "json_object" else value.text
            sampling[GRAMMARS[value.kind]] = text
        elif field in ("logprobs", "token_ids_logprob"):
            body |= {"return_logprob": True, "return_text_in_logprobs": True}
            body["top_logprobs_num" if field == "logprobs" else field] = value
        elif name in SglangSampling.model_fields:
            sampling[name] = list(value) if isinstance(value, tuple) else value
        else:
            raise InvalidRequest(field, "is not served by an endpoint")
    return body


def _usage(meta: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        cached_tokens=meta["cached_tokens"],
    )


def _logprobs(meta: Mapping[str, Any]) -> list[ChosenLogprob]:
    """Those of an answer's tokens."""

    def others(name: str, index: int) -> list[tuple[str, int, float]]:
        entries = meta[name][index] if name in meta else []
        return [(text, token_id, logprob) for logprob, token_id, text in entries]

    return [
        ChosenLogprob(
            token=text,
            token_id=token_id,
            logprob=logprob,
            top=others("output_top_logprobs", index),
            named=others("output_token_ids_logprobs", index),
        )
        for index, (logprob, token_id, text) in enumerate(meta["output_token_logprobs"])
    ]
