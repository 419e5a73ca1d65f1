"""What every request body is made of: fields with their checks, `Body`, and reading one.

A field is served, or has no effect whatever its value (`user`), or is refused by name unless its
value asks for nothing (`presence_penalty: 0`). A field that a body doesn't name is an error too.
Imports no jax.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, FailFast
from pydantic_core import PydanticCustomError

from jaxserve.entry.failures import HttpFailure, UnsupportedParameter
from jaxserve.types import InvalidRequest, SamplingParams, load_json

MAX_PROMPTS = 1024
"""Prompts of one /v1/completions, times its n."""
MAX_ERRORS = 100
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
"""As a key of an object."""
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""The JSON schema of a prompt."""


def only(*allowed: Any) -> Any:
    """The type of a field that is not supported: None and the `allowed` values, which ask for
    nothing, pass.
    """

    def check(value: Any) -> Any:
        for one in (None, *allowed):
            if isinstance(value, bool) == isinstance(one, bool) and value == one:
                return value
        raise PydanticCustomError("unsupported_parameter", "is not supported by this server")

    schema = {"description": "Not supported; a value that asks for nothing is accepted."}
    return Annotated[
        Any,
        pydantic.PlainValidator(check),
        pydantic.WithJsonSchema({**schema, "enum": [None, *allowed]}),
    ]


def check_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or token ids, as a list of prompts.

    Raises: PydanticCustomError naming the first item that doesn't fit.
    """

    def fail(where: str, item: Any, allowed: str) -> PydanticCustomError:
        return PydanticCustomError(
            "prompt_type",
            "{where}is {kind}; allowed: {allowed}",
            {"where": where, "kind": _kind(item), "allowed": allowed},
        )

    def check_ids(ids: list[Any], where: str) -> None:
        for i, token in enumerate(ids):
            if type(token) is not int:
                raise fail(f"{where}item {i} ", token, "token ids")
            if token < 0:
                raise PydanticCustomError(
                    "prompt_type",
                    "{where}item {i} is negative; allowed: token ids",
                    {"where": where, "i": i},
                )

    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fail("", value, "a string, token ids, or a list of either")
    if not value:
        raise PydanticCustomError("prompt_empty", "is empty; allowed: at least one token or prompt")
    if isinstance(value[0], str):
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise fail(f"item {i} ", item, "a string, like the first item")
    elif isinstance(value[0], list):
        for i, item in enumerate(value):
            if not isinstance(item, list):
                raise fail(f"item {i} ", item, "a list of token ids, like the first item")
            check_ids(item, f"item {i}, ")
    else:
        check_ids(value, "")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt_count",
            "has {count} prompts; allowed: at most {most}",
            {"count": len(value), "most": MAX_PROMPTS},
        )
    return value


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


Prompt = Annotated[
    Any,
    pydantic.PlainValidator(check_prompt),
    pydantic.WithJsonSchema(
        {
            "description": "One prompt or several, each as text or as token ids.",
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                TOKEN_IDS,
                {"type": "array", "items": TOKEN_IDS, "minItems": 1},
            ],
        }
    ),
]


def check_stop(value: Any) -> tuple[str, ...]:
    """Stop strings as a tuple; None is none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise PydanticCustomError("stop_type", "is neither a string nor a list of strings")


Stop = Annotated[
    Any,
    pydantic.PlainValidator(check_stop),
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]


# Named with `type`: before Python 3.12.2 `Annotated[..., FailFast()]` can't stand in a union.
type TokenIds = Annotated[list[int], FailFast()]
type Texts = Annotated[list[str], FailFast()]
type BadWords = Annotated[list[str | TokenIds], FailFast()]


def check_biases(value: Any) -> Any:
    """Token ids as numbers: JSON has only strings for keys."""
    if not isinstance(value, dict):
        return value
    if not all(TOKEN_ID.fullmatch(key) for key in value):
        raise PydanticCustomError("logit_bias_key", "has a key that is no token id")
    return {int(token_id): bias for token_id, bias in value.items()}


LogitBias = Annotated[dict[int, float], pydantic.BeforeValidator(check_biases)]


class Body(pydantic.BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def sampling_params(**given: Any) -> SamplingParams:
    """SamplingParams of the fields that a client set; one that is None takes its default.

    Raises: InvalidRequest naming the field.
    """
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def parse[B: Body](kind: type[B], body: bytes) -> B:
    """The request in `body`.

    Raises: HttpFailure for what is no JSON object; InvalidRequest or UnsupportedParameter naming
    the first wrong field.
    """
    try:
        found = kind.model_validate_json(body)
        load_json(body)
        return found
    except pydantic.ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # listing a million errors takes seconds
            raise HttpFailure(400, f"{error.error_count()} fields are wrong or unknown") from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # The deepest: where a value may be one of two types, the one that fitted best says why it
        # didn't fit.
        first = max(errors, key=lambda e: len(e["loc"]))
    location = _location(first["loc"])
    message = first["msg"]
    if first["type"] == "json_invalid":
        raise HttpFailure(400, f"the body is not JSON: {message}", "invalid_json")
    if not location:
        raise HttpFailure(400, f"the body is not a JSON object: {message}", "invalid_json")
    if first["type"] == "unsupported_parameter":
        raise UnsupportedParameter(location, message)
    if first["type"] == "extra_forbidden":
        raise InvalidRequest(location, "is not a parameter of this endpoint")
    raise InvalidRequest(location, message)


def _location(parts: Sequence[int | str]) -> str:
    """`messages[0].content` of ("messages", 0, "content"); names of union members are left out."""
    text = ""
    for i, part in enumerate(parts):
        if isinstance(part, int):
            text += f"[{part}]"
        elif part[:1].isupper() and i < len(parts) - 1:
            pass  # a model's name
        elif part not in ("str", "list[TextPart]") and "[" not in part:
            text += f".{part}" if text else part
    return text
