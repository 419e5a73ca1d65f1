"""Calls that a grammar has brought about (`tool_choice` "required", or one tool by name).

Whatever the model's own format, the text then is a JSON list of calls, or one call's arguments.
"""

from typing import Any

from jaxserve.entry.parsers.parser import Parser
from jaxserve.entry.parsers.tool_calls.mistral import Mistral


class CallList(Mistral):
    """[{"name": ..., "arguments": {...}}, ...] and nothing else."""

    needs_special_tokens = False

    def start(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith("["):
            self._text, self._state = text[1:], self.listed
        elif text:
            self._state = self.plain
        return bool(text)


class Arguments(Parser):
    """The arguments of the one tool there is."""

    def start(self, ended: bool) -> bool:
        (name,) = self._names
        self._call(name)
        self._state = self.more
        return True

    def more(self, ended: bool) -> bool:
        self._arguments(self._text)
        self._text = ""
        return False


def grammar_for_tools(
    tools: list[dict[str, Any]], name: str | None, most: int | None = None
) -> dict[str, Any]:
    """The JSON schema of what these parsers read: of the arguments of the tool `name`, or of a
    list of one call or more, `most` at the most.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {f["name"]: f.get("parameters") or {"type": "object"} for f in functions}
    if name is not None:
        return schemas[name]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(schema, f"#/items/anyOf/{i}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, (name, schema) in enumerate(schemas.items())
    ]
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself still hold where it is a part of another, at `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references are within what has an id
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
