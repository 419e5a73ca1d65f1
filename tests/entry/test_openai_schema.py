"""Request bodies: whatever comes in, it is a request or an error that names the field."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.entry import openai_answers as answers
from jaxserve.entry import openai_schema as schema
from jaxserve.entry.body_fields import Body, parse
from jaxserve.entry.failures import HttpFailure, UnsupportedParameter, describe
from jaxserve.types import InvalidRequest, SamplingParams

KINDS = (
    schema.CompletionRequest,
    schema.ChatRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)
VALID: dict[type[Body], dict[str, Any]] = {
    schema.CompletionRequest: {"prompt": "a"},
    schema.ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    schema.TokenizeRequest: {"prompt": "a"},
    schema.DetokenizeRequest: {"tokens": [1]},
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["text", "user", "auto", "none", 10**4000, -1, 0, 1]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def body_of(kind: type[Body], **changes: Any) -> bytes:
    return json.dumps(VALID[kind] | changes).encode()


def try_it(kind: type[Body], body: bytes) -> None:
    """Parses a body and reads its parameters; only a client's errors may come of it."""
    try:
        request = parse(kind, body)
        if isinstance(request, schema.CompletionRequest | schema.ChatRequest):
            assert isinstance(request.sampling(), SamplingParams)
        if isinstance(request, schema.ChatRequest):
            assert all(isinstance(m["content"], str) for m in request.template_messages())
    except (InvalidRequest, HttpFailure) as error:
        failure = describe(error)
    else:
        return
    assert failure.status == 400
    assert len(failure.message) <= 500


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_field_is_a_request_or_a_clients_error(data: st.DataObject):
    kind = data.draw(st.sampled_from(KINDS))
    names = st.sampled_from([*kind.model_fields, "unknown"])
    try_it(kind, body_of(kind, **data.draw(st.dictionaries(names, values, max_size=4))))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_are_a_request_or_a_clients_error(kind: Any, noise: bytes, position: int):
    body = body_of(kind)
    try_it(kind, noise)
    try_it(kind, body[:position] + noise + body[position:])


@pytest.mark.parametrize("kind", [schema.CompletionRequest, schema.ChatRequest])
def test_unsupported_fields_pass_only_with_values_that_ask_for_nothing(kind: type[Body]):
    definitions = kind.model_json_schema()["properties"]
    unsupported = {
        name: field["enum"]
        for name, field in definitions.items()
        if str(field.get("description")).startswith("Not supported")
    }
    assert unsupported
    for name, allowed in unsupported.items():
        for value in allowed:
            parse(kind, body_of(kind, **{name: value}))
        for value in (3, True, "x", [1], {"a": 1}):
            if any(type(value) is type(one) and value == one for one in allowed):
                continue
            with pytest.raises(UnsupportedParameter) as caught:
                parse(kind, body_of(kind, **{name: value}))
            assert caught.value.field == name


def test_defaults_are_openais():
    completion = parse(schema.CompletionRequest, body_of(schema.CompletionRequest))
    assert completion.sampling() == SamplingParams()
    assert completion.default_max_tokens == 16
    chat = parse(schema.ChatRequest, body_of(schema.ChatRequest))
    assert chat.sampling() == SamplingParams()
    assert chat.default_max_tokens is None
    for kind in (schema.CompletionRequest, schema.ChatRequest):
        nulls = dict.fromkeys(set(kind.model_fields) - set(VALID[kind]))
        assert (
            parse(kind, body_of(kind, **nulls)).sampling()
            == (completion if kind is schema.CompletionRequest else chat).sampling()
        )


def test_impossible_tokens_have_a_finite_logprob():
    from jaxserve.types import ChosenLogprob

    token = ChosenLogprob(
        token="a", token_id=1, logprob=float("-inf"), top=[("b", 2, float("-inf"))]
    )
    chat = answers.chat_logprobs([token], lambda _: b"a")
    assert chat is not None
    assert chat["content"][0]["logprob"] == -9999.0
    completion = answers.completion_logprobs(
        [token], {1: b"a", 2: b"b"}.__getitem__, answers.TextOffsets()
    )
    assert completion is not None
    assert completion["top_logprobs"] == [{"b": -9999.0}]
