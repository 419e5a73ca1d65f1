"""The parameters that ask for structured output, on every surface."""

import json
from typing import Any

import grpc.aio
import pytest
from server_fakes import FakeEngine, finish, serving_grpc, serving_http

from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.structured import SGLANG_PARAMETERS, grammar_of
from jaxserve.types import Grammar, InvalidRequest, SamplingParams, TokenOutput

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TAG = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
WAYS: list[tuple[dict[str, Any], tuple[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, ("json_object", "")),
    ({"response_format": FORMAT}, ("json_schema", SCHEMA)),
    ({"response_format": {"type": "structural_tag", **TAG}}, ("structural_tag", None)),
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"guided_regex": "[0-9]"}, ("regex", "[0-9]")),
    ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, ("grammar", 'start: "a"')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ("structural_tag", TAG)),
]
SGLANG = [
    ({"regex": "a"}, ("regex", "a")),
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"json_schema": "$$ANY$$"}, ("json_object", "")),
    ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"structural_tag": json.dumps(TAG)}, ("structural_tag", TAG)),
]
NOTHING: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"json": None, "json_object": False, "whitespace_pattern": None}},
]
WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}},
        "response_format.json_schema.x",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
]


def check(grammar: Grammar | None, kind: str, value: Any) -> None:
    assert grammar is not None
    assert grammar.kind == kind
    if value is not None:
        text = grammar.text if isinstance(value, str) else json.loads(grammar.text)
        assert text == value


@pytest.mark.parametrize(("given", "expected"), WAYS + SGLANG)
def test_each_way_of_asking(given: dict[str, Any], expected: tuple[str, Any]):
    check(grammar_of(given), *expected)


def test_sglang_parameters_are_known():
    assert grammar_of(dict.fromkeys(SGLANG_PARAMETERS)) is None
    assert {name for given, _ in SGLANG for name in given} == set(SGLANG_PARAMETERS)


@pytest.mark.parametrize("given", NOTHING)
def test_what_asks_for_nothing(given: dict[str, Any]):
    assert grammar_of(given) is None


@pytest.mark.parametrize(("given", "field"), WRONG)
def test_what_is_wrong_is_named(given: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        {"structures": []},
        {"triggers": []},
        {"triggers": ["<g="]},
        {"triggers": ["<f=", "<"]},
        {"structures": [{"begin": "<f=", "schema": 3}]},
        {"structures": [{"begin": 3}]},
        {"format": {}},
    ],
)
def test_structural_tags_are_checked(change: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="grammar: "):
        Grammar.structural_tag(TAG | change)


def test_grammars_of_python_are_checked():
    assert Grammar.parse("regex=a=b") == Grammar.regex("a=b")
    assert Grammar.parse('choice=["a"]') == Grammar.choice(["a"])
    assert Grammar.parse("json_object") == Grammar.json_object()
    for wrong in ("a+", "yaml=x", "choice=a", "json_schema={"):
        with pytest.raises(InvalidRequest):
            Grammar.parse(wrong)
    with pytest.raises(InvalidRequest, match="at most"):
        Grammar.regex("a" * 300_000)
    with pytest.raises(InvalidRequest, match="Unicode"):
        Grammar.regex("\ud800")
    with pytest.raises(InvalidRequest, match="grammar"):
        SamplingParams(grammar="[0-9]")  # pyright: ignore[reportArgumentType]


def refuse_bad(engine: FakeEngine) -> None:
    """Has an engine take longer for grammars, and refuse those with `bad` in them."""
    step = engine._step

    def stepping(one):
        grammar = one.request.sampling.grammar
        if grammar is not None and "bad" in grammar.text:
            del engine.running[one.request.request_id]
            return TokenOutput(
                request_id=one.request.request_id, token_ids=[], finish_reason="error",
                error="can't be", invalid_field=grammar.field,
            )  # fmt: skip
        if grammar is not None and one.position == 0:
            one.position = 1
            return TokenOutput(request_id=one.request.request_id, token_ids=[])
        return step(one)

    engine._step = stepping


@pytest.mark.parametrize(("given", "expected"), WAYS)
async def test_http_sends_it_to_the_engine(given, expected):
    async with serving_http(set_up=refuse_bad) as (served, http):
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 4, "n": 2}),
            ("/v1/chat/completions", chat),
        ):
            assert (await http.post(path, json=body | given)).status_code == 200
        assert len(served.engine.requests) == 3
        for request in served.engine.requests:
            check(request.sampling.grammar, *expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_regex": "bad"}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"bad": 1}}}},
            "response_format.json_schema.schema",
        ),
        *WRONG,
    ],
)
async def test_http_refuses_with_400_before_anything_is_streamed(given, param, stream):
    async with serving_http(set_up=refuse_bad) as (served, http):
        body = {"prompt": "a", "stream": stream, "n": 2} | given
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        # pydantic names what isn't of the field's type itself
        assert response.json()["error"]["param"] == param
        await served.idle()


GRPC = [
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"json_object": True}, ("json_object", "")),
    ({"regex": "a"}, ("regex", "a")),
    ({"choice": pb.Choices(choices=["a", "b"])}, ("choice", ["a", "b"])),
    ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ({"structural_tag": json.dumps(TAG)}, ("structural_tag", TAG)),
]


async def test_grpc_sends_it_to_the_engine_and_refuses_with_invalid_argument():
    async with serving_grpc(set_up=refuse_bad) as (served, stub):
        for given, expected in GRPC:
            sampling = pb.SamplingParams(max_tokens=3, **given)
            await finish(stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
            check(served.engine.requests[-1].sampling.grammar, *expected)
        for given, name in (({"regex": "bad"}, "regex"), ({"json_schema": "{"}, "json_schema")):
            sampling = pb.SamplingParams(max_tokens=3, **given)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await finish(stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(f"{name}: ")
