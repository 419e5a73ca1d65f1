"""SGLang's calls over a real engine: cached prefixes, log-probabilities, scores."""

import asyncio
import io
import json
import math
import re

import httpx
import pytest
import pytest_asyncio

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.client import Client
from jaxserve.entry.serve import Server

FIRST = "Once upon a time in a town by the sea there was a lighthouse whose keeper"


LIMITS = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 64}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tiny_folder):
    def make_client(config, observer, on_progress):
        return Client(config, process="thread", observer=observer, on_progress=on_progress)

    config = EngineConfig(model=str(tiny_folder), **LIMITS)
    server = Server(config, ServerConfig(port=0), make_client=make_client, out=io.StringIO())
    task = asyncio.ensure_future(server.run())
    try:
        async with asyncio.timeout(240):
            await server.ready.wait()
        assert server.addresses is not None
        url = f"http://127.0.0.1:{server.addresses.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield http
    finally:
        server.stop()
        server.stop()
        async with asyncio.timeout(30):
            await task


@pytest.mark.asyncio(loop_scope="module")
async def test_the_second_call_has_the_firsts_prefix_from_the_cache(http):
    async def hits() -> float:
        text = (await http.get("/metrics")).text
        [value] = re.findall(r"^jaxserve_prefix_cache_hits_total\S* (\S+)$", text, re.M)
        return float(value)

    params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    body = {"text": FIRST, "sampling_params": params}
    # as curl sends it: -H 'Content-Type: application/json' -d '...'
    headers = {"content-type": "application/json"}
    first = (await http.post("/generate", content=json.dumps(body), headers=headers)).json()
    assert first["meta_info"]["completion_tokens"] == 30
    assert first["meta_info"]["cached_tokens"] == 0
    ids = (await http.post("/tokenize", json={"prompt": FIRST})).json()["tokens"]
    longer = [*ids, *first["output_ids"], 70, 71, 72]
    before = await hits()
    body = {"input_ids": longer, "sampling_params": params}
    second = (await http.post("/generate", json=body)).json()
    # The KV of the last token generated was never needed, so never computed.
    whole = (len(ids) + 30 - 1) // 16 * 16
    assert second["meta_info"]["cached_tokens"] == whole >= 96
    assert await hits() - before == whole
    # As text: what the first call said need not tokenize to the tokens that it was.
    text = FIRST + first["text"] + " And then"
    told = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    third = (await http.post("/generate", json={"text": text, "sampling_params": params})).json()
    same = next(
        (i for i, (a, b) in enumerate(zip(told, longer, strict=False)) if a != b),
        min(len(told), len(longer)),
    )
    assert third["meta_info"]["cached_tokens"] >= min(same, whole) // 16 * 16


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_and_prompt_logprobs_are_those_of_the_python_api(http, tiny_folder):
    items, labels = [" and a dog", " or"], [70, 5, 97]
    params = SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=0, temperature=0)
    with LLM(str(tiny_folder), process="thread", **LIMITS) as llm:
        outputs = llm.generate([FIRST + item for item in items], params)
    expected = []
    for output in outputs:
        [token] = output.choices[0].logprobs or ()
        vocabulary = {token_id: math.exp(logprob) for _, token_id, logprob in token.top}
        assert sum(vocabulary.values()) == pytest.approx(1, abs=1e-5)
        expected.append([vocabulary[label] for label in labels])
    body = {"query": FIRST, "items": items, "label_token_ids": labels}
    answer = (await http.post("/v1/score", json=body)).json()
    for found, row in zip(answer["scores"], expected, strict=True):
        assert found == pytest.approx(row, rel=1e-4)
    answer = (await http.post("/v1/score", json={**body, "apply_softmax": True})).json()
    for found, row in zip(answer["scores"], expected, strict=True):
        assert found == pytest.approx([one / sum(row) for one in row], rel=1e-4)
    body = {
        "text": FIRST + items[0], "sampling_params": {"max_new_tokens": 1, "regex": "[xy]"},
        "return_logprob": True, "logprob_start_len": 20, "token_ids_logprob": labels,
    }  # fmt: skip
    answer = (await http.post("/generate", json=body)).json()
    assert answer["text"] in ("x", "y")
    meta = answer["meta_info"]
    [first, *rest] = meta["input_token_logprobs"]
    assert first == [None, outputs[0].prompt_token_ids[20], None]
    wanted = [token.logprob for token in outputs[0].prompt_logprobs[21:]]
    assert [entry[0] for entry in rest] == pytest.approx(wanted, abs=1e-4)
    [named] = meta["output_token_ids_logprobs"]
    assert [math.exp(entry[0]) for entry in named] == pytest.approx(expected[0], rel=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_is_scored_without_a_token_generated(http):
    """By OpenAI's completions with echo, and by /generate with no new tokens."""
    body = {"prompt": FIRST, "echo": True, "logprobs": 3, "max_tokens": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    [choice] = answer["choices"]
    assert (choice["text"], answer["usage"]["completion_tokens"]) == (FIRST, 0)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == FIRST
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    assert all(a >= b for a, b in zip(best, logprobs["token_logprobs"][1:], strict=True))
    body = {
        "text": FIRST, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
        "logprob_start_len": 0,
    }  # fmt: skip
    answer = (await http.post("/generate", json=body)).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    scored = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert scored[0] is None
    assert scored[1:] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-5)
