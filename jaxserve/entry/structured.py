"""The ways that other servers ask for structured output, as a Grammar. Imports no jax.

OpenAI   response_format {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}
vLLM     structured_outputs {"json": ...}, and before it guided_json, guided_regex, ...
SGLang   regex, json_schema, ebnf, structural_tag among the sampling parameters
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.types import Grammar, InvalidRequest

Maker = Callable[[Any, str], Grammar | None]
"""Makes a grammar of a parameter's value; the second is the parameter's name, for errors."""


def from_response_format(value: Any, field: str = "response_format") -> Grammar | None:
    """Of OpenAI's response_format; None for text. A schema is kept to whether `strict` or not.

    Raises: InvalidRequest naming the field.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            _only(value, field, "type")
            return None
        case "json_object":
            _only(value, field, "type")
            return Grammar.json_object(field)
        case "json_schema":
            _only(value, field, "type", "json_schema")
            inner, name = value.get("json_schema"), f"{field}.json_schema"
            if not isinstance(inner, Mapping) or inner.get("schema") is None:
                raise InvalidRequest(f"{name}.schema", "is not given; allowed: a JSON schema")
            _only(inner, name, "name", "description", "schema", "strict")
            return Grammar.json_schema(inner["schema"], f"{name}.schema")
        case "structural_tag":
            return Grammar.structural_tag(value, field)
    raise InvalidRequest(
        f"{field}.type", f"is {kind!r}; allowed: text, json_object, json_schema, structural_tag"
    )


def _text(make: Callable[[str, str], Grammar]) -> Maker:
    def checked(value: Any, field: str) -> Grammar:
        if not isinstance(value, str):
            raise InvalidRequest(field, f"is a {type(value).__name__}; allowed: a string")
        return make(value, field)

    return checked


def _json_object(value: Any, field: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"is {value!r}; allowed: true or false")
    return Grammar.json_object(field) if value else None


def _json_schema(value: Any, field: str) -> Grammar:
    return Grammar.json_object(field) if value == "$$ANY$$" else Grammar.json_schema(value, field)


MAKERS: dict[str, Maker] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": _text(Grammar.regex),
    "guided_choice": Grammar.choice,
    "guided_grammar": _text(Grammar.grammar),
    "structured_outputs.json": Grammar.json_schema,
    "structured_outputs.regex": _text(Grammar.regex),
    "structured_outputs.choice": Grammar.choice,
    "structured_outputs.grammar": _text(Grammar.grammar),
    "structured_outputs.json_object": _json_object,
    "structured_outputs.structural_tag": Grammar.structural_tag,
    "regex": _text(Grammar.regex),
    "json_schema": _json_schema,
    "ebnf": _text(Grammar.grammar),
    "structural_tag": Grammar.structural_tag,
    "response_format": from_response_format,
}
"""By the parameter's name; those of SGLang have no prefix."""


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """The one grammar that a request asks for by parameters named as in MAKERS; None is not given.

    SGLang's /generate: `grammar_of({name: body.get(name) for name in SGLANG_PARAMETERS})`.
    Raises: InvalidRequest naming the parameter, and for more than one.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if structured := named.pop("structured_outputs", None):
        if not isinstance(structured, Mapping):
            raise InvalidRequest("structured_outputs", "is no object")
        for name, value in structured.items():
            full = f"structured_outputs.{name}"
            if full in MAKERS:
                named[full] = value
            elif value not in (None, False):
                raise InvalidRequest(full, "is not supported by this server")
    made = [
        grammar
        for name, value in named.items()
        if value is not None and (grammar := MAKERS[name](value, name)) is not None
    ]
    if len(made) > 1:
        raise InvalidRequest(made[1].field, f"can't be given beside {made[0].field}")
    return made[0] if made else None


SGLANG_PARAMETERS = ("regex", "json_schema", "ebnf", "structural_tag")


def _only(value: Mapping[str, Any], field: str, *allowed: str) -> None:
    for name in value:
        if name not in allowed:
            raise InvalidRequest(f"{field}.{name}", f"allowed here: {', '.join(allowed)}")
