"""The server's description of itself, /openapi.json: its bodies, with the ranges that are checked
elsewhere and what of them depends on the model. Imports no jax.
"""

import copy
from collections.abc import Iterator
from typing import Any

import fastapi
import pydantic.json_schema

from jaxserve.entry import batches, embeddings, responses_schema, sglang
from jaxserve.entry import openai_schema as schema
from jaxserve.entry.front import Front
from jaxserve.types import MAX_STOP_STRINGS, RANGES

BODIES = (
    schema.CompletionRequest,
    schema.ChatRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
    embeddings.EmbeddingRequest,
    responses_schema.ResponsesRequest,
    batches.BatchRequest,
    *sglang.BODIES,
)
"""What endpoints read themselves."""
OURS = {
    **{sglang.NAMES[ours]: ours for ours in sglang.NAMES},
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
}
"""The name in SamplingParams of fields that are called otherwise."""
PROMPTS = ("prompt", "tokens", "input", "input_ids")
"""Fields whose integers are token ids, beside those of type TokenIds."""
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
REFUSED = {
    "description": "What is wrong with the request.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def describe(app: fastapi.FastAPI, front: Front) -> dict[str, Any]:
    """The whole of it."""
    description = fastapi.FastAPI.openapi(app)
    _, found = pydantic.json_schema.models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    bodies = copy.deepcopy(found["$defs"])  # it shares parts with the fields' own
    for body in bodies.values():
        for name, field in body.get("properties", {}).items():
            _describe_field(OURS.get(name) or name, field, front)
    bodies["TokenIds"]["items"] |= _token_range(front)
    bodies["Error"] = ERROR
    description["components"] = {"schemas": bodies}
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which nothing here answers
            operation["responses"]["4XX"] = REFUSED
    return description


def _token_range(front: Front) -> dict[str, int]:
    return {"minimum": 0, "maximum": front.info.vocab_size - 1}


def _describe_field(name: str, field: dict[str, Any], front: Front) -> None:
    if name in RANGES:
        field.update(RANGES[name].json_schema())
    elif name == "max_tokens":
        field.update(minimum=1, maximum=front.info.max_request_tokens)
    elif name == "model":
        field["enum"] = [front.model_name, None]
    elif name == "stop":
        for kind in field["anyOf"]:
            text = kind.get("items", kind)
            text.update({"minLength": 1} if text["type"] == "string" else {})
            kind.update({"maxItems": MAX_STOP_STRINGS} if kind["type"] == "array" else {})
    elif name == "logit_bias":
        biases = field["anyOf"][0]
        biases["propertyNames"] = {"pattern": "^(0|[1-9][0-9]*)$", "maxLength": _digits(front)}
        biases["additionalProperties"] |= {"minimum": -100, "maximum": 100}
    elif name in PROMPTS:
        for part in _parts(field):
            if part.get("type") == "integer":
                part.update(_token_range(front))


def _digits(front: Front) -> int:
    """Of ids that are all in the vocabulary."""
    return len(str(front.info.vocab_size)) - 1


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that it is made of."""
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _parts(part)
