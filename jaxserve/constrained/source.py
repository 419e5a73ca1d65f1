"""Grammars in llguidance's own language. Imports no jax."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"( |\n[ \t]{0,40})"
"""Between the parts of JSON: at most a space, or a line break and its indentation. A model that
likes to write white space would else write nothing but."""

_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
_TEMPERATURE = re.compile(r"^\s*[A-Za-z_0-9]+\s*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)


class GrammarError(ValueError):
    """A grammar that can't be followed; says why."""


def to_llguidance(grammar: Grammar, is_special: Callable[[str], bool]) -> str:
    """The grammar in llguidance's language. `is_special` says whether a text is a special token.

    Raises: GrammarError where that shows already here.
    """
    try:
        return _WRITERS[grammar.kind](grammar.text, is_special)
    except GrammarError:
        raise
    # llguidance's reader of EBNF raises bare Exceptions for what is wrong with it.
    except Exception as error:
        raise GrammarError(str(error)) from error


def _schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if schema is False or not can_end(schema, schema):
        raise GrammarError("no JSON text can match the schema")
    text = json.dumps(without_open_bounds(schema))
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)


def _json_schema(text: str, is_special: Callable[[str], bool]) -> str:
    return _schema(json.loads(text))


def _json_object(text: str, is_special: Callable[[str], bool]) -> str:
    return _schema({"type": "object"})


def _regex(text: str, is_special: Callable[[str], bool]) -> str:
    return llguidance.LLMatcher.grammar_from_regex(text)


def _choice(text: str, is_special: Callable[[str], bool]) -> str:
    choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(choices))


def _grammar(text: str, is_special: Callable[[str], bool]) -> str:
    # In EBNF an alternative may begin a line; the library's reader takes it for a new rule.
    lark = any_to_lark(re.sub(r"\s*\n\s*\|", " |", text) if "::=" in text else text)
    if _TEMPERATURE.search(lark):
        raise GrammarError("a rule's temperature is not supported")
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _structural_tag(text: str, is_special: Callable[[str], bool]) -> str:
    """Free text, and from each trigger on one of the structures that begin with it.

    A trigger that is a special token is that token, else it is text.
    """
    tag = json.loads(text)
    lines = ["%llguidance {}", "TEXT: /(.|\\n)*/", "tail: TEXT"]
    names: list[str] = []
    for t, trigger in enumerate(tag["triggers"]):
        ways: list[str] = []
        for one in tag["structures"]:
            if not one["begin"].startswith(trigger):
                continue
            schema = one.get("schema", {})
            schema = {} if schema is True else schema
            if schema is False or not can_end(schema, schema):
                raise GrammarError(f"no JSON text can match the schema of {one['begin']!r}")
            schema = {**without_open_bounds(schema), "x-guidance": _OPTIONS}
            begin = one["begin"].removeprefix(trigger)
            parts = [_quote(begin), f"%json {json.dumps(schema)}", _quote(one.get("end", ""))]
            ways.append(" ".join(part for part in parts if part))
        if is_special(trigger):
            head = f"TEXT {trigger}"
        else:
            lines.append(f"head_{t}[lazy]: TEXT {_quote(trigger)}")
            head = f"head_{t}"
        for w, way in enumerate(ways):
            lines.append(f"way_{t}_{w}: {way}")
        lines.append(
            f"tag_{t}: {head} (" + " | ".join(f"way_{t}_{w}" for w in range(len(ways))) + ")"
        )
        names.append(f"tag_{t}")
    lines.append(f"start: ({' | '.join(names)})* tail")
    return llguidance.LLMatcher.grammar_from_lark("\n".join(lines))


def _quote(text: str) -> str:
    """A Lark string; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


_WRITERS: dict[GrammarKind, Callable[[str, Callable[[str], bool]], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def can_end(schema: Any, root: Any, within: tuple[str, ...] = ()) -> bool:
    """False if every value that a JSON schema describes holds another one without end, as when an
    object requires a property of its own kind.

    The library would begin such a text and never be able to finish it.
    """

    def of(part: Any) -> bool:
        return can_end(part, root, within)

    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        if reference in within:
            return False
        target = _resolve(reference, root)
        if not can_end(target, root, (*within, reference)):
            return False
    for part in schema.get("allOf") or ():
        if not of(part):
            return False
    for key in ("anyOf", "oneOf"):
        if schema.get(key) and not any(of(part) for part in schema[key]):
            return False
    kinds = schema.get("type", ())
    properties = schema.get("properties") or {}
    endless_object = any(
        not of(properties[name]) for name in schema.get("required") or () if name in properties
    )
    count = schema.get("minItems", 0)
    first = schema.get("prefixItems") or ()
    endless_array = any(not of(part) for part in first[:count]) or (
        count > len(first) and not of(schema.get("items"))
    )
    for kind, endless in (("object", endless_object), ("array", endless_array)):
        if endless and kinds in (kind, [kind]):
            return False
    return True


def without_open_bounds(schema: Any) -> Any:
    """The schema with bounds moved that the library (1.9) takes wrongly: of 3 < x <= 3.5 it allows
    3, as of any range within a unit that a whole number bounds without being in it."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            made[key] = {name: without_open_bounds(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            made[key] = [without_open_bounds(part) for part in value]
        else:
            made[key] = without_open_bounds(value) if key in _SCHEMAS else value
    if "integer" in (made.get("type"), *(made["type"] if _is_list(made.get("type")) else ())):
        return made
    for key, closed, others in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = made.get(key)
        ends = [made[other] for other in others if _is_number(made.get(other))]
        if not _is_number(bound) or bound != int(bound) or closed in made:
            continue
        nearest = min(ends, key=lambda end: abs(end - bound), default=None)
        if nearest is not None and 0 < abs(nearest - bound) < 1:
            del made[key]
            made[closed] = bound + (nearest - bound) / 1024
    return made


_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _resolve(reference: str, root: Any) -> Any:
    """What a local reference points at; None if nothing, which the library tells better."""
    value = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value
