"""Structured output from a real engine of a tiny model: the Python API, and tools over HTTP."""

import asyncio
import io
import json
import re

import msgspec
import openai
import pytest
import tiny_vocabulary
from engines import write_model

from jaxserve import LLM, Grammar, InvalidRequest, SamplingParams
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.client import Client
from jaxserve.entry.serve import Server

LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 64, "page_size": 8, "num_pages": 600}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=tiny_vocabulary.VOCAB_SIZE,
        max_position_embeddings=512,
    )
    tiny_vocabulary.tokenizer().save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **LIMITS) as llm:
        yield llm


def test_choices_deltas_stops_and_usage(llm):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = SamplingParams(
        grammar=Grammar.json_schema(schema), n=3, max_tokens=60, temperature=1.0, seed=1
    )
    [output] = llm.generate("The quick", params)
    found = [json.loads(choice.text) for choice in output.choices]
    assert all(isinstance(one["name"], str) for one in found)
    streamed = ["", "", ""]
    for delta in llm.stream("The quick", params):
        assert delta.token_ids or delta.finish_reason
        streamed[delta.index] += delta.text
    assert streamed == [choice.text for choice in output.choices]
    stopping = SamplingParams(grammar=Grammar.choice(["one two three"]), stop=" t")
    [output] = llm.generate("The quick", stopping)
    assert (output.text, output.choices[0].stop_reason) == ("one", " t")


def test_the_best_of_several_and_no_beams(llm):
    params = SamplingParams(
        grammar=Grammar.regex("[a-f]{2,9}"), best_of=4, n=2, max_tokens=20, logprobs=1, seed=2
    )
    [output] = llm.generate("The quick", params)
    means = []
    for choice in output.choices:
        assert re.fullmatch("[a-f]{2,9}", choice.text)
        means.append(sum(one.logprob for one in choice.logprobs) / len(choice.logprobs))
    [everyone] = llm.generate("The quick", msgspec.structs.replace(params, best_of=None, n=4))
    assert {choice.text for choice in output.choices} <= {c.text for c in everyone.choices}
    assert means == sorted(means, reverse=True)
    bad = msgspec.structs.replace(params, grammar=Grammar.regex("a["))
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match=r"grammar: .*unclosed"):
            call("x", bad)


def test_a_text_that_its_grammar_ends_is_whole_without_an_end_token(llm):
    [output] = llm.generate("x", SamplingParams(grammar=Grammar.choice(["fox}"]), ignore_eos=True))
    assert (output.text, output.finish_reason) == ("fox}", "stop")


def test_a_grammar_that_cannot_be_followed_raises_before_anything_runs(llm):
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match=r"grammar: .*unclosed"):
            call("x", SamplingParams(grammar=Grammar.regex("a[")))
    [output] = llm.generate("x", SamplingParams(grammar=Grammar.regex("ab")))
    assert output.text == "ab"


async def test_tools_that_must_be_called_and_the_format_of_a_response(folder):
    def make_client(config, observer, on_progress):
        return Client(config, process="thread", observer=observer, on_progress=on_progress)

    place = {
        "type": "object", "properties": {"at": {"$ref": "#/$defs/side"}}, "required": ["at"],
        "additionalProperties": False, "$defs": {"side": {"enum": ["left", "right"]}},
    }  # fmt: skip
    count = {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": False,
    }  # fmt: skip
    functions = [{"name": "go", "parameters": place}, {"name": "wait", "parameters": count}]
    tools = [{"type": "function", "function": function} for function in functions]
    config = EngineConfig(model=str(folder), **LIMITS)
    server = Server(config, ServerConfig(port=0), make_client=make_client, out=io.StringIO())
    task = asyncio.ensure_future(server.run())
    try:
        async with asyncio.timeout(240):
            await server.ready.wait()
        assert server.addresses is not None
        url = f"http://127.0.0.1:{server.addresses.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            [model] = (await client.models.list()).data

            async def calls(choice, seed):
                answer = await client.chat.completions.create(
                    model=model.id, messages=[{"role": "user", "content": "Go"}], tools=tools,
                    tool_choice=choice, max_tokens=100, temperature=1, seed=seed,
                )  # fmt: skip
                message = answer.choices[0].message
                assert not message.content
                return [(c.function.name, json.loads(c.function.arguments))
                        for c in message.tool_calls]  # fmt: skip

            for seed in range(4):
                found = await calls("required", seed)
                assert found
                for name, arguments in found:
                    if name == "go":
                        assert arguments in ({"at": "left"}, {"at": "right"})
                    else:
                        assert (name, list(arguments)) == ("wait", ["n"])
                        assert isinstance(arguments["n"], int)
                named = {"type": "function", "function": {"name": "go"}}
                [(name, arguments)] = await calls(named, seed)
                assert name == "go"
                assert arguments in ({"at": "left"}, {"at": "right"})
            form = {"type": "json_schema", "name": "count", "schema": count, "strict": True}
            answer = await client.responses.create(
                model=model.id, input="Go", text={"format": form}, max_output_tokens=50
            )
            assert isinstance(json.loads(answer.output_text)["n"], int)
            form["schema"] = {"$ref": "#/nowhere"}
            with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
                await client.responses.create(model=model.id, input="Go", text={"format": form})
    finally:
        server.stop()
        server.stop()
        async with asyncio.timeout(30):
            await task
