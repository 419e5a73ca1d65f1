"""SGLang's native API over a fake engine."""

import asyncio
import itertools
import json
import math
from typing import Any

import httpx
import pytest
import pytest_asyncio
from server_fakes import REPLY, byte_tokenizer, serving_http
from test_http import check_error, first


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    async with serving_http() as served_and_http:
        yield served_and_http


def events(text: str) -> list[dict[str, Any]]:
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_one_text():
    async with serving_http() as (served, http):
        served.engine.cached = 2
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
        answer = (await http.post("/generate", json=body)).json()
        meta = answer["meta_info"]
        assert answer["text"] == first(5)
        assert answer["output_ids"] == served.engine.reply_ids[:5]
        assert meta["finish_reason"] == {"type": "length", "length": 5}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 5)
        assert meta["cached_tokens"] == 2
        assert meta["e2e_latency"] > 0
        assert list(served.engine.requests[-1].token_ids) == byte_tokenizer().encode("abc", False)
        await http.post("/generate", json={"text": "abc"})
        assert served.engine.requests[-1].sampling.max_tokens == 128
        await http.post("/generate", json={"text": "a" * 200})  # the context has room for 56
        assert served.engine.requests[-1].sampling.max_tokens == 56


async def test_names_reach_the_engine():
    async with serving_http() as (served, http):
        sampling = {
            "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
            "min_p": 0.1, "stop_token_ids": [7], "ignore_eos": True, "sampling_seed": 3,
            "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.25,
            "logit_bias": {"7": -2.5}, "json_schema": None,
        }  # fmt: skip
        answer = await http.post("/generate", json={"text": "a", "sampling_params": sampling})
        assert answer.status_code == 200
        found = served.engine.requests[-1].sampling
        assert (found.max_tokens, found.min_tokens, found.temperature) == (9, 2, 0.5)
        assert (found.top_p, found.top_k, found.min_p) == (0.9, 0, 0.1)
        assert (found.stop_token_ids, found.seed) == ((7,), 3)
        assert (found.frequency_penalty, found.presence_penalty) == (0.5, -1)
        assert (found.repetition_penalty, found.logit_bias) == (1.25, {7: -2.5})
        assert found.grammar is None


@pytest.mark.asyncio(loop_scope="module")
async def test_grammars_reach_the_engine(shared):
    served, http = shared
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
    for given, kind, text in (
        ({"json_schema": '{"type": "string"}'}, "json_schema", '{"type": "string"}'),
        ({"json_schema": {"type": "string"}}, "json_schema", '{"type": "string"}'),
        ({"json_schema": "$$ANY$$"}, "json_object", ""),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structural_tag": json.dumps(tag)}, "structural_tag", json.dumps(tag)),
    ):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 2, **given}}
        assert (await http.post("/generate", json=body)).status_code == 200
        grammar = served.engine.requests[-1].sampling.grammar
        assert (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.asyncio(loop_scope="module")
async def test_stops(shared):
    _, http = shared
    for sampling, text, reason in (
        ({"stop": [", w"]}, "Hello", {"type": "stop", "matched": ", w"}),
        ({"stop": ", w", "no_stop_trim": True}, "Hello, w", {"type": "stop", "matched": ", w"}),
        ({"stop_regex": r"l+"}, "He", {"type": "stop", "matched": "l"}),
    ):
        body = {"text": "a", "sampling_params": sampling}
        answer = (await http.post("/generate", json=body)).json()
        assert answer["text"] == text
        assert answer["meta_info"]["finish_reason"] == reason


@pytest.mark.asyncio(loop_scope="module")
async def test_lists_and_choices(shared):
    served, http = shared
    sampling = {"max_new_tokens": 3}
    answers = (
        await http.post("/generate", json={"text": ["a", "bc"], "sampling_params": sampling})
    ).json()
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [1, 2]
    answers = (
        await http.post("/generate", json={"text": ["a"], "sampling_params": sampling})
    ).json()
    assert len(answers) == 1
    each = [{"max_new_tokens": 2}, {"max_new_tokens": 4}]
    answers = (
        await http.post("/generate", json={"input_ids": [[5], [6, 7]], "sampling_params": each})
    ).json()
    assert [a["text"] for a in answers] == [REPLY[:2], REPLY[:4]]
    answer = (
        await http.post("/generate", json={"input_ids": [5, 6], "sampling_params": sampling})
    ).json()
    assert answer["meta_info"]["prompt_tokens"] == 2
    answers = (
        await http.post("/generate", json={"text": "a", "sampling_params": {**sampling, "n": 3}})
    ).json()
    assert len(answers) == 3
    seeds = [request.sampling.seed for request in served.engine.requests[-3:]]
    assert len(set(seeds)) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_are_cumulative_and_end_as_the_whole(shared):
    _, http = shared
    body = {"text": "a", "sampling_params": {"max_new_tokens": 7}}
    whole = (await http.post("/generate", json=body)).json()
    chunks = events((await http.post("/generate", json={**body, "stream": True})).text)
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3, "n": 2}, "stream": True}
    last = {
        chunk["index"]: chunk for chunk in events((await http.post("/generate", json=body)).text)
    }
    assert {index: chunk["text"] for index, chunk in last.items()} == dict.fromkeys(
        range(4), REPLY[:3]
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs(shared):
    _, http = shared
    body = {
        "text": "a", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True,
        "top_logprobs_num": 2,
    }  # fmt: skip
    whole = (await http.post("/generate", json=body)).json()
    meta = whole["meta_info"]
    ids = whole["output_ids"]
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
    assert [top[0] for top in meta["output_top_logprobs"]] == [[-0.5, t, None] for t in ids]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    body["return_text_in_logprobs"] = True
    chunks = events((await http.post("/generate", json={**body, "stream": True})).text)
    entries = chunks[-1]["meta_info"]["output_token_logprobs"]
    assert entries == [[-0.5, token, text] for token, text in zip(ids, "Hel", strict=True)]


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_of_the_prompt_and_of_named_tokens(shared):
    served, http = shared
    ids = byte_tokenizer().encode("abcd", False)
    body = {
        "text": "abcd", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True,
        "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [9, 4],
        "return_text_in_logprobs": True,
    }  # fmt: skip
    whole = (await http.post("/generate", json=body)).json()
    assert served.engine.requests[-1].sampling.prompt_logprobs == 2
    meta = whole["meta_info"]
    nine, four = (byte_tokenizer().token_text(token) for token in (9, 4))
    named, top = [[-3.0, 9, nine], [-4.0, 4, four]], [[-1.0, 0, "!"], [-2.0, 1, '"']]
    assert meta["input_token_logprobs"] == [
        [None, ids[1], "b"], [-0.25, ids[2], "c"], [-0.25, ids[3], "d"],
    ]  # fmt: skip
    assert meta["input_top_logprobs"] == [None, top, top]
    assert meta["input_token_ids_logprobs"] == [None, named, named]
    assert meta["output_token_ids_logprobs"] == [named, named]
    assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 2
    for event in events((await http.post("/generate", json={**body, "stream": True})).text):
        for name in meta:
            if name.startswith("input_"):
                assert event["meta_info"][name] == meta[name]
    body = {**body, "logprob_start_len": 0, "top_logprobs_num": 0, "token_ids_logprob": None}
    body["sampling_params"]["n"] = 2
    first, second = (await http.post("/generate", json=body)).json()
    assert [entry[:2] for entry in first["meta_info"]["input_token_logprobs"]] == [
        [None, ids[0]], *[[-0.25, token] for token in ids[1:]],
    ]  # fmt: skip
    assert second["meta_info"]["input_token_logprobs"] == first["meta_info"]["input_token_logprobs"]
    assert not any("top" in name or "ids" in name for name in first["meta_info"])
    body = {**body, "logprob_start_len": -1}
    assert (await http.post("/generate", json=body)).json()[0]["meta_info"][
        "input_token_logprobs"
    ] == []
    assert served.engine.requests[-1].sampling.prompt_logprobs is None


@pytest.mark.asyncio(loop_scope="module")
async def test_scores(shared):
    served, http = shared
    encode = byte_tokenizer().encode
    body = {"query": "ab", "items": ["c", "de"], "label_token_ids": [7, 5]}
    answer = (await http.post("/v1/score", json=body)).json()
    row = [math.exp(-3), math.exp(-4)]
    assert answer["scores"] == [pytest.approx(row)] * 2
    assert (answer["object"], answer["model"]) == ("scoring", "tiny")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    asked = served.engine.requests[-2:]
    assert [list(r.token_ids) for r in asked] == [encode("abc", False), encode("abde", False)]
    assert asked[0].sampling.token_ids_logprob == (7, 5)
    body |= {"apply_softmax": True, "item_first": True, "model": "tiny"}
    answer = (await http.post("/v1/score", json=body)).json()
    assert answer["scores"] == [pytest.approx([p / sum(row) for p in row])] * 2
    assert list(served.engine.requests[-1].token_ids) == encode("deab", False)
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7]}
    assert (await http.post("/v1/score", json=body)).json()["scores"] == [[row[0]]] * 2
    assert [list(r.token_ids) for r in served.engine.requests[-2:]] == [[1, 2, 3], [1, 2, 4, 5]]
    body = {"query": "a", "items": "bc", "label_token_ids": [7]}
    assert (await http.post("/v1/score", json=body)).json()["scores"] == [[row[0]]]
    assert list(served.engine.requests[-1].token_ids) == encode("abc", False)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"query": None}, 400, "query"),
        ({"items": []}, 400, "items"),
        ({"items": [[1]]}, 400, "items"),
        ({"items": ["b"] * 13}, 400, "items"),
        ({"items": ["b", "c" * 300]}, 400, "items[1]"),
        ({"label_token_ids": []}, 400, "label_token_ids"),
        ({"label_token_ids": [258]}, 400, "label_token_ids"),
        ({"label_token_ids": [1] * 129}, 400, "label_token_ids"),
        ({"model": "other"}, 404, "model"),
        ({"temperature": 1}, 400, "temperature"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_can_not_be_scored_is_named(shared, change: Any, status: int, param: str):
    served, http = shared
    body = {"query": "a", "items": ["b"], "label_token_ids": [1], **change}
    check_error(await http.post("/v1/score", json=body), status, param)
    await served.idle()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [[1]] * 13}, "input_ids"),
        ({"input_ids": [1] * 300}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": "a" * 300}, "text"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 300}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": "a", "sampling_params": {"regex": 1}}, "sampling_params.regex"),
        (
            {"text": "a", "sampling_params": {"structural_tag": {}}},
            "sampling_params.structural_tag",
        ),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        (
            {"text": "a", "sampling_params": {"logit_bias": {"258": 1}}},
            "sampling_params.logit_bias",
        ),
        (
            {"text": "a", "sampling_params": {"presence_penalty": 3}},
            "sampling_params.presence_penalty",
        ),
        ({"text": ["a", "b"], "sampling_params": []}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params.n"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [258]}, "token_ids_logprob"),
        (
            {
                "text": "a",
                "return_logprob": True,
                "logprob_start_len": 0,
                "stream": True,
                "sampling_params": {"n": 2},
            },
            "sampling_params.n",
        ),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "rid": "ü"}, "rid"),
        ({"text": "a", "priority": 2}, "priority"),
        ({"text": "a", "nothing": 1}, "nothing"),
        ({"text": ["a"] * 13}, "text"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_is_named(shared, body: dict[str, Any], param: str):
    served, http = shared
    before = len(served.engine.requests)
    check_error(await http.post("/generate", json=body), 400, param)
    await served.idle()
    assert len(served.engine.requests) in (before, before + 1)


async def test_names_of_requests_are_not_those_of_a_lists_parts():
    async with serving_http() as (served, http):
        served.engine.step_s = 0.02

        async def ask(**body: Any) -> httpx.Response:
            return await http.post("/generate", json=body)

        tasks = [asyncio.ensure_future(ask(text=["a", "b", "c"], rid="foo"))]
        tasks += [asyncio.ensure_future(ask(text="a", rid=f"foo{end}")) for end in ("-1", "-2")]
        tasks.append(asyncio.ensure_future(ask(input_ids=[[5], [6]], rid="foo-1-1")))
        for answer in await asyncio.gather(*tasks):
            assert answer.status_code == 200, answer.text


async def test_abort_by_name_and_all():
    async with serving_http() as (served, http):
        served.engine.step_s = 0.02

        async def ask(rid: str) -> httpx.Response:
            return await http.post("/generate", json={"text": "a", "rid": rid})

        tasks = [asyncio.ensure_future(ask(name)) for name in ("one", "two", "three")]
        async with asyncio.timeout(2):
            while len(served.engine.running) < 3:
                await asyncio.sleep(0.005)
        check_error(await ask("one"), 400, "rid")
        assert (await http.post("/abort_request", json={"rid": "two"})).status_code == 200
        assert check_error(await tasks[1], 503)["code"] == "request_aborted"
        assert (await tasks[1]).headers["x-should-retry"] == "false"
        assert not tasks[0].done()
        await http.post("/abort_request", json={"abort_all": True})
        for task in (tasks[0], tasks[2]):
            check_error(await task, 503)
        assert (await http.post("/abort_request", json={"rid": "gone"})).status_code == 200
        check_error(await http.post("/abort_request", json={}), 400, "rid")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_server_says_of_itself(shared):
    served, http = shared
    info = (await http.get("/get_model_info")).json()
    assert info["model_path"] == "tiny"
    assert info["is_generation"] is True
    info = (await http.get("/get_server_info")).json()
    assert info["page_size"] == 16
    assert info["engine"]["max_model_len"] == 256
    assert info["internal_states"][0]["pages_total"] == 64
    before = len(served.engine.requests)
    assert (await http.get("/health_generate")).status_code == 200
    assert served.engine.requests[before].sampling.max_tokens == 1
    assert (await http.post("/flush_cache")).status_code == 200
