"""docs/parameter_table.md is true: every field of every way in changes something, or is refused."""

import json
import re
from collections.abc import Iterable
from typing import Any

import grpc.aio
import httpx
import msgspec
import pytest
import pytest_asyncio
from google.protobuf import json_format
from server_fakes import FakeEngine, fake_client_maker, serving
from test_chat_tools import THINKS, TOOLS

from docs import parameter_table as table
from jaxserve.config import EngineConfig
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc
from jaxserve.types import Grammar, InvalidRequest, SamplingParams

REPLY = (
    '<think>Hm.</think>It<s>is.<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)
SCHEMA = {"type": "object"}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
TAGS = {"type": "structural_tag", **TAG}

VALUES: dict[str, Any] = {
    "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
    "typical_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 3, "logit_bias": {"5": 1.0}, "allowed_token_ids": [5],
    "bad_words": ["x"], "bad_words_ids": [[5]], "seed": 7, "stop": ["."], "stop_regex": ["i."],
    "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": 2,
    "top_logprobs": 2, "prompt_logprobs": 1, "token_ids_logprob": [5], "n": 2,
    "prompt_logprobs_start": 1,
    "logprobs_mode": "processed_logprobs", "skip_special_tokens": False, "best_of": 2,
    "truncate_prompt_tokens": 1, "echo": True, "stream": True, "stream_interval": 4,
    "stream_options": {"include_usage": True}, "use_beam_search": True, "cache_salt": "s",
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": 'start: "a"', "grammar": 'start: "a"', "json_schema": json.dumps(SCHEMA),
    "json_object": True, "regex": "a", "choice": ["a"], "structural_tag": json.dumps(TAG),
    "ebnf": 'start: "a"', "user": "u", "model": "other", "request_id": "r-1", "rid": "r-1",
    "prompt": "cd", "text": "cd", "input": "cd", "input_ids": [5, 6], "tokens": [5, 6],
    "messages": [{"role": "user", "content": "other"}], "tools": TOOLS, "tool_choice": "none",
    "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": True},
    "separate_reasoning": False, "include_reasoning": False, "metadata": {"a": "b"},
    "safety_identifier": "s", "prompt_cache_key": "k", "instructions": "Be brief.",
    "previous_response_id": "resp_1", "store": False, "background": True, "dimensions": 3,
    "encoding_format": "base64", "normalize": False, "pooling": "mean", "priority": 1,
    "max_new_tokens": 3, "min_new_tokens": 2, "no_stop_trim": True, "sampling_seed": 7,
    "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0,
    "return_text_in_logprobs": True, "max_completion_tokens": 3, "max_output_tokens": 3,
    "max_response_tokens": 3,
}  # fmt: skip
"""A value of each field that differs from what it does when it isn't given."""
WITH: dict[str, dict[str, Any]] = {
    "include_stop_str_in_output": {"stop": ["."]}, "no_stop_trim": {"stop": ["."]},
    "top_logprobs": {"logprobs": True}, "logprobs_mode": {"logprobs": 1},
    "stream_interval": {"stream": True}, "stream_options": {"stream": True},
    "use_beam_search": {"max_tokens": 2, "temperature": 0.0},
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
    "top_logprobs_num": {"return_logprob": True}, "token_ids_logprob": {"return_logprob": True},
    "return_text_in_logprobs": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True}, "prompt_logprobs_start": {"prompt_logprobs": 1},
}  # fmt: skip
"""What a field needs beside it to mean anything; of these, what the surface has."""
SAYS_NOTHING = {
    "spaces_between_special_tokens": "no tokenizer served here puts any: both values say the same",
}
ELSEWHERE = {
    **dict.fromkeys(("length_penalty", "early_stopping"), "tests/e2e/test_search.py"),
    "queue": "tests/entry/test_client.py",
}
"""Fields whose effect a fake engine doesn't show, and what tests them."""
HTTP: dict[str, tuple[str, dict[str, Any]]] = {
    "`/v1/completions`": ("/v1/completions", {"prompt": "ab", "seed": 1, "max_tokens": 120}),
    "`/v1/chat/completions`": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "ab"}], "seed": 1},
    ),
    "`/v1/responses`": ("/v1/responses", {"input": "ab", "seed": 1, "max_output_tokens": 200}),
    "`/generate`": ("/generate", {"text": "ab"}),
    "`/v1/embeddings`": ("/v1/embeddings", {"input": "ab"}),
}
OTHERWISE: dict[tuple[str, str], Any] = {
    ("`/v1/chat/completions`", "logprobs"): True,
    ("`/v1/responses`", "tools"): FLAT,
    ("`/v1/responses`", "response_format"): {"format": {"type": "json_object"}},
    ("`/v1/embeddings`", "truncate_prompt_tokens"): 1,
    ("`/generate`", "structural_tag"): TAG,
}
"""Values of fields that are written otherwise in a place."""
WRITTEN = {
    ("`/v1/responses`", "response_format"): "text",
    ("`/v1/responses`", "prompt (a template)"): "prompt",
}


def test_the_page_is_what_the_schemas_say():
    assert table.PAGE.read_text() == table.page(), "run python -m docs.parameter_table"


def fast(engine: FakeEngine) -> None:
    engine.ends = True


ROOM = {"max_model_len": 1024, "max_request_tokens": 1024}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    async with serving(
        reply=REPLY, template=THINKS, set_up=fast, info=ROOM, embeddings=True
    ) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def python():
    """A client and its engine."""
    engines: list[FakeEngine] = []
    make_client = fake_client_maker(engines, fast, REPLY, THINKS, **ROOM)
    async with make_client(EngineConfig(model="tiny"), None, None) as client:
        yield client, engines[0]


def cases(title: str, kinds: tuple[str, ...]) -> list[str]:
    [surface] = [one for one in table.surfaces() if one.title == title]
    return sorted(name for name, kind in surface.fields.items() if kind in kinds)


def shown(titles: Iterable[str]) -> list[tuple[str, str]]:
    """(surface, field) of all fields that a fake engine shows something of."""
    return [
        (title, name)
        for title in titles
        for name in cases(title, (table.WORKS, table.LABEL))
        if name not in SAYS_NOTHING and name not in ELSEWHERE
    ]


def value_of(title: str, name: str) -> Any:
    return OTHERWISE.get((title, name), VALUES.get(name))


def sent(engine: FakeEngine) -> list[Any]:
    """What reached the engine since the last call."""
    requests, engine.requests = engine.requests, []
    found = []
    for one in requests:
        sampling = one.sampling
        if one.pooling is not None:  # a fresh seed that nothing is drawn by
            sampling = msgspec.structs.replace(sampling, seed=0)
        found.append((one.token_ids, sampling, one.priority, one.cache_salt, one.pooling))
    return found


def plain(text: str, ids: bool = False) -> str:
    """Without what differs between any two answers, unless `ids` are what is asked for."""
    text = text if ids else re.sub(r'"(id|item_id|call_id)":"[^"]*"', "", text)
    return re.sub(r'"(created|created_at|e2e_latency)":[\d.]+', "", text)


@pytest.mark.parametrize(("title", "name"), shown(HTTP))
@pytest.mark.asyncio(loop_scope="module")
async def test_http_fields_do_something_or_are_labels(served, title: str, name: str):
    path, base = HTTP[title]
    [surface] = [one for one in table.surfaces() if one.title == title]
    beside = {k: v for k, v in WITH.get(name, {}).items() if k in surface.fields}
    if "logprobs" in beside:
        beside["logprobs"] = value_of(title, "logprobs")
    if title == "`/v1/responses`" and "tools" in beside:
        beside["tools"] = FLAT
    if name == "input_ids":
        base = {}
    value = value_of(title, name)
    assert value is not None, f"{name} needs a value in VALUES"
    written = WRITTEN.get((title, name), name)

    async def ask(**fields: Any) -> tuple[int, str, Any]:
        body = {**base, **beside, **fields}
        if title == "`/generate`":
            inner = table.sglang.SglangSampling.model_fields
            body["sampling_params"] = {"max_new_tokens": 120, "sampling_seed": 1}
            body["sampling_params"] |= {k: body.pop(k) for k in list(body) if k in inner}
        async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
            answer = await http.post(path, json=body)
        return answer.status_code, plain(answer.text, name == "rid"), sent(served.engine)

    before, after = await ask(), await ask(**{written: value})
    assert before[0] == (400 if name == "input_ids" else 200), before
    if surface.fields[name] == table.LABEL:
        assert after[0] == 200
        assert after[2] == before[2]
    elif after[0] == 200:
        assert after[1:] != before[1:]
    else:  # what only this server, or this way of starting it, refuses
        assert after[0] in (400, 404), after
        assert name in ("model", "priority", "dimensions", "previous_response_id"), after


@pytest.mark.parametrize("value", ["x", 3, {"x": 1}, ["x"]], ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_http_fields_that_are_refused_are_named(served, value: Any):
    async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
        for title, (path, base) in HTTP.items():
            for name in cases(title, (table.REFUSED,)):
                written = WRITTEN.get((title, name), name)
                inner = title == "`/generate`" and name in table.sglang.SglangSampling.model_fields
                fields = {written: value}
                body = {**base, **({"sampling_params": fields} if inner else fields)}
                answer = await http.post(path, json=body)
                assert answer.status_code == 400, (title, name, answer.text)
                assert written in answer.json()["error"]["param"], (title, name)
            answer = await http.post(path, json={**base, "no_such_field": value})
            assert answer.json()["error"]["param"] == "no_such_field", title


GRPC = {
    "gRPC `Generate`": (pb.GenerateRequest, "Generate", {"text": "ab"}),
    "gRPC `Chat`": (pb.ChatRequest, "Chat", {"messages": [{"role": "user", "content": "ab"}]}),
}
GRPC_VALUES: dict[str, Any] = {
    "allowed_token_ids": {"ids": [5]}, "bad_words_ids": [{"ids": [5]}], "tokens": {"ids": [5]},
    "choice": {"choices": ["a"]}, "tool_choice": {"mode": "none"},
    "chat_template_kwargs": json.dumps({"enable_thinking": True}),
    "tools": [
        {"name": t["function"]["name"], "parameters": json.dumps(SCHEMA)} for t in TOOLS
    ],
}  # fmt: skip


@pytest.mark.parametrize(("title", "name"), shown(GRPC))
@pytest.mark.asyncio(loop_scope="module")
async def test_grpc_fields_do_something(served, title: str, name: str):
    kind, method, base = GRPC[title]
    value = GRPC_VALUES.get(name, VALUES.get(name))
    assert value is not None, f"{name} needs a value in VALUES"
    inner = pb.SamplingParams.DESCRIPTOR.fields_by_name

    async def ask(**fields: Any) -> tuple[str, str, Any]:
        known = {**kind.DESCRIPTOR.fields_by_name, **inner}
        beside = {k: GRPC_VALUES.get(k, v) for k, v in WITH.get(name, {}).items() if k in known}
        beside |= fields
        sampling = {"seed": 1, "max_tokens": 200}
        sampling |= {k: v for k, v in beside.items() if k in inner}
        body = {**base, **{k: v for k, v in beside.items() if k not in inner}}
        if "tokens" in body:
            del body["text"]
        message = json_format.ParseDict({**body, "sampling": sampling}, kind())
        async with grpc.aio.insecure_channel(served.target) as channel:
            call = getattr(jaxserve_pb2_grpc.InferenceStub(channel), method)(message)
            try:
                answers = [json_format.MessageToJson(a, indent=None) async for a in call]
            except grpc.aio.AioRpcError as error:
                return error.code().name, error.details() or "", sent(served.engine)
        text = "\n".join(answers)
        if name != "request_id":
            text = re.sub(r'"(requestId|id)": "[^"]*"', "", text)
        return "OK", text, sent(served.engine)

    before, after = await ask(), await ask(**{name: value})
    assert before[0] == "OK", before
    if name in table.LABELS:
        assert after == before
    elif after[0] == "OK":
        assert after[1:] != before[1:]
    else:
        assert after[0] in ("INVALID_ARGUMENT", "NOT_FOUND"), after
        assert name in ("model", "priority"), after


PYTHON = {
    "grammar": Grammar.regex("a"), "allowed_token_ids": (5,), "logit_bias": {5: 1.0},
    "request_id": "r-1", "template": {"enable_thinking": True},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SamplingParams.__struct_fields__))
@pytest.mark.asyncio(loop_scope="module")
async def test_python_fields_do_something(python, name: str):
    if name in SAYS_NOTHING or name in ELSEWHERE:
        return
    value = PYTHON.get(name, VALUES.get(name))
    assert value is not None, f"{name} needs a value in VALUES"
    client, engine = python
    beside = {k: v for k, v in WITH.get(name, {}).items() if k in SamplingParams.__struct_fields__}
    found = []
    for fields in ({}, {name: value}):
        given = {"seed": 1, "max_tokens": 120, **beside, **fields}
        stream = await client.open("ab", SamplingParams(**given))
        deltas = [(d.text, d.token_ids, d.logprobs, d.prompt_logprobs) async for d in stream]
        found.append((deltas, sent(engine)))
    assert found[0] != found[1]


def test_what_is_tested_elsewhere_is():
    for name, path in ELSEWHERE.items():
        assert name in (table.PAGE.parents[1] / path).read_text()


@pytest.mark.asyncio(loop_scope="module")
async def test_python_refuses_by_name_what_it_does_not_know(python):
    with pytest.raises(TypeError, match="no_such_field"):
        SamplingParams(no_such_field=1)  # pyright: ignore
    with pytest.raises(InvalidRequest, match="priority"):
        await python[0].open("ab", SamplingParams(), priority=1)
