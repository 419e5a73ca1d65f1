"""JSON as it comes, character by character: where a value ends, and a call that is an object.
Imports no jax.
"""

import json
from collections.abc import Callable, Collection
from typing import Any


class JsonValue:
    """Finds the end of an object, list or string."""

    def __init__(self):
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> tuple[str, bool]:
        """(as much of `text` as belongs to the value, whether it has ended)."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if not self._depth and not self._in_string:
                return text[: i + 1], True
        return text, False


class CallObject:
    """A call that is written {"name": "f", "arguments": {...}}, in any order of its keys.

    `on_name` is told the name, then `on_arguments` the arguments as they come, as text that is
    JSON. An object that turns out to be none of that before its name is told is `broken`; `raw` is
    what it had then.
    """

    def __init__(
        self,
        on_name: Callable[[str], None],
        on_arguments: Callable[[str], None],
        names: Collection[str] | None = None,
    ):
        """`names`: allowed ones; None: any."""
        self._on_name = on_name
        self._on_arguments = on_arguments
        self._names = names
        self.raw = ""
        self.is_started = False
        self.broken = False
        self._where = "open"
        self._token = ""
        self._key = ""
        self._value: JsonValue | None = None
        self._is_streamed = False
        """The value is told as it comes."""
        self._early = ""
        """Arguments that came before the name."""
        self._has_arguments = False

    def take(self, text: str) -> tuple[str, bool]:
        """(the text after the object, whether it has ended). Check `broken` after."""
        for i, character in enumerate(text):
            if not self.is_started:
                self.raw += character
            ended = self._step(character)
            if self.broken:
                return text[i + 1 :], True
            if ended:
                self._end()
                return text[i + 1 :], True
        return "", False

    def _step(self, character: str) -> bool:
        is_space = character in " \t\r\n"
        match self._where:
            case "open":
                if character == "{":
                    self._where = "key"
                elif not is_space:
                    self.broken = True
            case "key" | "next key":
                if character == '"':
                    self._value, self._token, self._where = JsonValue(), "", "in key"
                    self._grow(character)
                elif character == "}" and self._where == "key":
                    return True
                elif not is_space:
                    self.broken = True
            case "in key":
                if self._grow(character):
                    self._key = self._load() if not self.broken else ""
                    self._where = "colon"
            case "colon":
                if character == ":":
                    self._where = "value"
                elif not is_space:
                    self.broken = True
            case "value":
                if not is_space:
                    self._token = ""
                    self._value = JsonValue() if character in '{["' else None
                    self._is_streamed = self._key in ("arguments", "parameters")
                    self._is_streamed &= character in "{["
                    self._where = "in value"
                    return self._value_step(character)
            case "in value":
                return self._value_step(character)
            case "after":
                if character == ",":
                    self._where = "next key"
                elif character == "}":
                    return True
                elif not is_space:
                    self.broken = True
        return False

    def _grow(self, character: str) -> bool:
        """Adds to the value; says whether it has ended."""
        assert self._value is not None
        self._token += character
        return self._value.take(character)[1]

    def _value_step(self, character: str) -> bool:
        if self._value is None:  # a number, true, false, null: ends before , or }
            if character in ",}":
                self._take_value()
                self._where = "next key"
                return character == "}"
            self._token += character
            return False
        if self._is_streamed:
            self._tell(character)
            ended = self._value.take(character)[1]
        else:
            ended = self._grow(character)
            if ended:
                self._take_value()
        if ended:
            self._where = "after"
        return False

    def _take_value(self) -> None:
        if self._key == "name":
            name = self._load()
            is_known = self._names is None or str(name) in self._names
            if not isinstance(name, str) or not name or not is_known:
                self.broken = True
            elif not self.is_started:
                self.is_started = True
                self._on_name(name)
                early, self._early = self._early, ""
                if early:
                    self._on_arguments(early)
        elif self._key in ("arguments", "parameters"):
            value = self._load()
            if value is not None:
                # Some models write the object as a string.
                self._tell(value if isinstance(value, str) else json.dumps(value))

    def _tell(self, text: str) -> None:
        self._has_arguments |= bool(text)
        if self.is_started:
            self._on_arguments(text)
        else:
            self._early += text

    def _load(self) -> Any:
        try:
            return json.loads(self._token)
        except ValueError:
            self.broken = True
            return None

    def _end(self) -> None:
        if not self.is_started:
            self.broken = True
        elif not self._has_arguments:
            self._on_arguments("{}")
