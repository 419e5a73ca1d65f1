"""The HTTP server over a fake engine, on a loopback port; by OpenAI's client and plain bytes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from server_fakes import REPLY, FakeEngine, Served, byte_tokenizer, serving, serving_http

from jaxserve.entry.front import Front

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(max_body_bytes=100_000) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """One server for all the requests that reach no engine."""
    async with serving_http(max_body_bytes=100_000) as served_and_http:
        yield served_and_http


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as client:
        yield client


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def first(num_tokens: int) -> str:
    """What the fake engine's first tokens say."""
    return (REPLY * 9).encode()[:num_tokens].decode()


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Checks that an answer is an error of OpenAI's form, and returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert param is None or error["param"] == param
    return error


# ---- the official client


async def test_chat_whole(client: openai.AsyncOpenAI, served: Served):
    served.engine.cached = 3
    answer = await client.chat.completions.create(**CHAT)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == first(20)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len("<user>Hi\n<assistant>")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_streams_what_it_answers_whole(client: openai.AsyncOpenAI):
    whole = await client.chat.completions.create(**CHAT, n=2)
    stream = await client.chat.completions.create(
        **CHAT, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = ["", ""], ["", ""]
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_chat_stream_events_are_openais(http: httpx.AsyncClient):
    body = {**CHAT, "max_tokens": 2, "stream": True}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {"content": "H"},
        {"content": "e"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_usage_is_null_but_in_the_last_chunk(http: httpx.AsyncClient):
    body = {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    text = (await http.post("/v1/chat/completions", json=body)).text
    chunks = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_completion_of_each_form_of_prompt(client: openai.AsyncOpenAI, served: Served):
    for prompt, count in (
        ("one", 1), (["one", "two"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2),
    ):  # fmt: skip
        answer = await client.completions.create(model="tiny", prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert {choice.text for choice in answer.choices} == {first(16)}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16 * 2 * count
    assert [list(r.token_ids) for r in served.engine.requests[-4:]] == [[5, 6], [5, 6], [7], [7]]


async def test_completion_streams_several_prompts(client: openai.AsyncOpenAI):
    stream = await client.completions.create(
        model="tiny", prompt=["a", "b", "c"], n=2, max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(6), REPLY[:5])
    assert usage is not None
    assert usage.completion_tokens == 30


async def test_stop_strings_and_eos(client: openai.AsyncOpenAI, served: Served):
    answer = await client.completions.create(model="tiny", prompt="a", stop=[", w"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert answer.choices[0].model_extra["stop_reason"] == ", w"
    served.engine.ends = True
    answer = await client.completions.create(model="tiny", prompt="a", max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")


async def test_parameters_reach_the_engine(client: openai.AsyncOpenAI, served: Served):
    await client.chat.completions.create(
        model="tiny", messages=CHAT["messages"], max_completion_tokens=9, temperature=0.5,
        top_p=0.9, seed=7, user="u", logit_bias={}, presence_penalty=0, frequency_penalty=0.0,
        tools=[], response_format={"type": "text"}, metadata={"a": "b"},
        extra_body={
            "top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9],
        },
    )  # fmt: skip
    sampling = served.engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (5, 0.1, 2)
    assert (sampling.seed, sampling.stop_token_ids) == (7, (9,))


async def test_token_options_reach_the_engine(client: openai.AsyncOpenAI, served: Served):
    options: dict[str, Any] = {
        "typical_p": 0.4, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
        "allowed_token_ids": [5, 9], "prompt_logprobs": 3, "token_ids_logprob": [4],
        "logprobs_mode": "processed_logprobs", "prompt_logprobs_start": 2,
    }  # fmt: skip
    await client.chat.completions.create(
        model="tiny", messages=CHAT["messages"], logit_bias={"7": -1}, presence_penalty=0.5,
        frequency_penalty=-0.5, extra_body={**options, "bad_words": ["ab", [3, 4]]},
    )  # fmt: skip
    sampling = served.engine.requests[-1].sampling
    for name, value in options.items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == {7: -1.0}
    tokenizer = byte_tokenizer()
    words = [tokenizer.encode(text, False) for text in ("ab", " ab")]
    assert sampling.bad_words == (*map(tuple, words), (3, 4))
    assert sampling.num_tokens == tokenizer.vocab_size


async def test_prompt_and_named_logprobs(client: openai.AsyncOpenAI, served: Served):
    request: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "n": 2}
    more = {"prompt_logprobs": 1, "token_ids_logprob": [9, 4]}
    answer = await client.completions.create(**request, logprobs=0, extra_body=more)
    assert [r.sampling.prompt_logprobs for r in served.engine.requests] == [1, None]
    _, b, c = byte_tokenizer().encode("abc", False)
    for choice in answer.choices:
        assert choice.model_extra is not None
        first, *rest = choice.model_extra["prompt_logprobs"]
        assert first is None
        assert [set(entry) for entry in rest] == [{str(t), "0", "9", "4"} for t in (b, c)]
        assert rest[0][str(b)] == {"logprob": -0.25, "decoded_token": "b"}
        assert choice.logprobs is not None
        named = choice.logprobs.model_extra["token_ids_logprob"]
        assert named == [{"9": -3.0, "4": -4.0}] * 2
    more = {"prompt_logprobs": 0, "token_ids_logprob": [9]}
    chat = await client.chat.completions.create(**CHAT, extra_body=more)
    assert chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
    assert not chat.choices[0].model_extra.get("prompt_logprobs")
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content[0].model_extra["token_ids_logprob"] == {"9": -3.0}


async def test_chat_logprobs(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 20
    first = logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5]
    assert [(t.token, t.bytes) for t in logprobs.content[8:10]] == [
        ("\ufffd", [0xC3]),
        ("\ufffd", [0xB6]),
    ]  # halves of ö
    told = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert told == "Hello, wörld! Hello".encode()
    plain = await client.chat.completions.create(**CHAT, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


async def test_completion_logprobs_stream_as_they_are_whole(client: openai.AsyncOpenAI):
    request: dict[str, Any] = {"model": "tiny", "prompt": "a", "logprobs": 2, "max_tokens": 12}
    whole = (await client.completions.create(**request)).choices[0].logprobs
    assert whole is not None
    # ö is of two tokens, both where it is in the text
    assert whole.tokens == [*"Hello, w", r"bytes:\xc3", r"bytes:\xb6", *"rl"]
    assert whole.text_offset == [*range(8), 8, 8, 9, 10]
    assert whole.token_logprobs == [-0.5] * 12
    assert whole.top_logprobs is not None
    assert all(len(top) == 2 for top in whole.top_logprobs)
    tokens, offsets = [], []
    async for chunk in await client.completions.create(**request, stream=True):
        if logprobs := chunk.choices[0].logprobs:
            tokens += logprobs.tokens or []
            offsets += logprobs.text_offset or []
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


async def test_content_parts_and_developer_role(client: openai.AsyncOpenAI, served: Served):
    await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text":
            "b"}]},
        ],
    )  # fmt: skip
    text = bytes(await _decode(served, list(served.engine.requests[-1].token_ids))).decode()
    assert text == "<system>Be brief\n<user>a\nb\n<assistant>"


async def _decode(served: Served, ids: list[int]) -> bytes:
    async with httpx.AsyncClient(base_url=served.url) as http:
        return (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"].encode()


async def test_models(client: openai.AsyncOpenAI):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_sync_client(served: Served):
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**CHAT).choices[0].message.content
            stream = client.chat.completions.create(**CHAT, stream=True)
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed


# ---- other endpoints


async def test_tokenize_and_back(http: httpx.AsyncClient):
    body = (await http.post("/tokenize", json={"prompt": "wörld"})).json()
    assert (body["count"], body["max_model_len"]) == (6, 256)
    assert (await http.post("/detokenize", json={"tokens": body["tokens"]})).json() == {
        "prompt": "wörld"
    }
    check_error(await http.post("/detokenize", json={"tokens": [999]}), 400, "tokens")


async def test_metrics_say_what_happened(http: httpx.AsyncClient, served: Served):
    served.engine.cached = 2
    await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 8})
    text = (await http.get("/metrics")).text
    for line in (
        'jaxserve_prompt_tokens_total{model_name="tiny"} 4.0',
        'jaxserve_generation_tokens_total{model_name="tiny"} 8.0',
        'jaxserve_prefix_cache_hits_total{model_name="tiny"} 2.0',
        'jaxserve_request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'jaxserve_inter_token_latency_seconds_count{model_name="tiny"} 7.0',
        'jaxserve_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'jaxserve_compiles_total{model_name="tiny",phase="runtime"} 0.0',
    ):
        assert line in text.splitlines()


async def test_openapi_describes_the_bodies(http: httpx.AsyncClient):
    description = (await http.get("/openapi.json")).json()
    schemas = description["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "TextPart"} <= set(schemas)
    body = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    assert body["application/json"]["schema"]["$ref"] == "#/components/schemas/CompletionRequest"


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**80}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ["x"] * 1000}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "typical_p": 0}, "typical_p"),
        ({"prompt": "a", "no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "bad_words": [[1, 258]]}, "bad_words"),
        ({"prompt": "a", "bad_words": ["x"] * 1025}, "bad_words"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs_start": 1}, "prompt_logprobs_start"),
        (
            {"prompt": "a", "prompt_logprobs": 0, "prompt_logprobs_start": 1},
            "prompt_logprobs_start",
        ),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "token_ids_logprob": [258]}, "token_ids_logprob"),
        ({"prompt": "a", "token_ids_logprob": [0] * 129}, "token_ids_logprob"),
        ({"prompt": "a", "logprobs_mode": "logits"}, "logprobs_mode"),
        ({"prompt": "a", "best_of": 0}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "no_such_thing": 1}, "no_such_thing"),
        ({"prompt": ["a"] * 2000}, "prompt"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_completions_are_refused_by_name(shared, body: dict[str, Any], param: str):
    served, http = shared
    check_error(await http.post("/v1/completions", json=body), 400, param)
    assert served.engine.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_chats_are_refused_by_name(shared, change: dict[str, Any], param: str):
    served, http = shared
    check_error(await http.post("/v1/chat/completions", json=CHAT | change), 400, param)
    assert served.engine.requests == []


async def test_context_too_long(http: httpx.AsyncClient):
    error = check_error(await http.post("/v1/completions", json={"prompt": "a" * 300}), 400)
    assert error["code"] == "context_length_exceeded"
    body = {"prompt": "a", "max_tokens": 256}
    error = check_error(await http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
        b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"a":' * 15_000,
        b"{" + b",".join(b'"a%d": 1' % i for i in range(5000)) + b"}",
    ],
    ids=range(16),
)
@pytest.mark.asyncio(loop_scope="module")
async def test_broken_bodies_are_refused(shared, body: bytes):
    _, http = shared
    headers = {"content-type": "application/json"}
    check_error(await http.post("/v1/completions", content=body, headers=headers), 400)
    assert (await http.get("/health")).status_code == 200


async def test_huge_bodies_are_refused(http: httpx.AsyncClient):
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "' + b"a" * 100_000 + b'"}'
    response = await http.post("/v1/completions", content=body, headers=headers)
    assert check_error(response, 413)["code"] == "request_too_large"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"a" * 10_000

    response = await http.post("/v1/completions", content=chunks(), headers=headers)
    check_error(response, 413)


async def test_paths_methods_types_and_models(http: httpx.AsyncClient):
    check_error(await http.get("/v2/nothing"), 404)
    check_error(await http.get("/v1/completions"), 405)
    check_error(await http.post("/v1/completions", content=b"{}"), 415)
    error = check_error(
        await http.post("/v1/completions", json={"prompt": "a", "model": "other"}), 404, "model"
    )
    assert error["code"] == "model_not_found"
    response = await http.options("/v1/completions", headers={"origin": "http://x"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_official_client_sees_the_error_classes(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="a", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"


def slow(engine: FakeEngine) -> None:
    engine.step_s = 0.05


async def test_full_queue_is_429_and_says_when_to_retry():
    async with serving_http(max_queue=2, set_up=slow) as (_, http):
        body = {"prompt": "a", "max_tokens": 4}
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for _ in range(12))
        )
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 6 + [429] * 6
        refused = next(answer for answer in answers if answer.status_code == 429)
        check_error(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        streamed = await asyncio.gather(
            *(http.post("/v1/completions", json={**body, "stream": True}) for _ in range(12))
        )
        assert sorted(answer.status_code for answer in streamed) == statuses
        error = check_error(
            await http.post("/v1/completions", json={"prompt": ["a"] * 7}), 400, "prompt"
        )
        assert "7" in error["message"]


async def test_a_fault_of_ours_is_a_500_that_says_nothing(http, served, monkeypatch, caplog):
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(Front, "check_model", fail)
    for response in (
        await http.post("/v1/completions", json={"prompt": "a"}),
        await http.post("/tokenize", json={"prompt": "a"}),
    ):
        assert "inside" not in check_error(response, 500)["message"]
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


# ---- clients that go, engines that die


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_a_client_that_goes_ends_its_request(served: Served, stream: bool, prompt: Any):
    served.engine.step_s = 0.01
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        async with asyncio.timeout(2):
            while len(served.engine.running) < (1 if prompt == "a" else 3):
                await asyncio.sleep(0.005)
    writer.close()
    await served.idle()
    assert len(served.engine.aborted) == len(served.engine.requests)


async def test_a_dead_engine_is_told_at_once(caplog: pytest.LogCaptureFixture):
    async with serving_http(set_up=slow) as (served, http):
        whole = asyncio.ensure_future(
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 200})
        )
        async with http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}
        ) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            served.engine.die()
            rest = [line async for line in lines if line]
            last = json.loads(rest[-1].removeprefix("data: "))
            assert last["error"]["code"] == "engine_unavailable"
            check_error(await whole, 503)
            check_error(await http.get("/health"), 503)
            check_error(await http.post("/v1/completions", json={"prompt": "a"}), 503)
        assert await served.task == 1


async def test_logs_hold_no_text(served: Served, http, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    await http.post("/v1/completions", json={"prompt": "secret words", "max_tokens": 4})
    await http.post("/v1/completions", json={"prompt": "secret words", "stop": ["secret"], "n": 0})
    await http.post("/v1/completions", json={"secret": 1, "prompt": "secret words"})
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    assert len(lines) == 3
    assert "200" in lines[0]
    assert "prompt=12" in lines[0]
    assert "generated=4" in lines[0]
    assert "finish=length" in lines[0]
    assert "400" in lines[1]
    assert "param='n'" in lines[1]
    assert "secret words" not in caplog.text
    assert "Hell" not in caplog.text
