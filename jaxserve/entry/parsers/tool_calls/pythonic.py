"""Llama 3.2 and 4: the answer is a Python list of calls, [f(a=1, b='x'), g()].

A call is told when it is complete: its arguments are no JSON before that. An answer may be such a
list without being calls: only names of tools make it one.
"""

import ast
import json
import re
from typing import Any

from jaxserve.entry.parsers.parser import Parser

BEGIN, END = "<|python_start|>", "<|python_end|>"
HEAD = re.compile(r"[A-Za-z_][\w.]*\s*(\(|$)")
"""What a call begins with, as far as it is there."""
CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(Parser):
    needs_special_tokens = True

    def start(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if not ended and (not text or (BEGIN.startswith(text) and text != BEGIN)):
            return False
        body = text.removeprefix(BEGIN).lstrip()
        if not body and not ended:
            return False
        space, self._lead = self._text[: len(self._text) - len(text)], ""
        if body.startswith("["):
            self._lead, self._text = space + "[", body[1:]
            self._state = self.calls
        else:
            self._text = space + text.removeprefix(BEGIN)
            self._state = self.plain
        return True

    def calls(self, ended: bool) -> bool:
        """Within the list, before a call or the list's end."""
        text = self._text.lstrip(" \t\r\n,")
        if text.startswith("]") and self._num_calls:
            self._text, self._state = text[1:], self.rest
            return True
        # what can't become a call any more need not wait for its end
        is_possible = not text or HEAD.match(text) is not None
        length = call_length(text) if is_possible else None
        if is_possible and length is None:
            if not ended:
                return False
            self.is_cut = "," in self._text or bool(text)
        call = read_call(text[:length]) if length else None
        if call is None or call[0] not in self._names:
            self._text = self._lead + self._text
            self._state = self.plain
            return True
        self._call(call[0])
        self._arguments(call[1])
        self._lead, self._text = "", text[length:]
        return True

    def rest(self, ended: bool) -> bool:
        return self._say_until(ended, END) is not None


def call_length(text: str) -> int | None:
    """Characters of the call that `text` begins with; None: it isn't complete."""
    depth, quote, escaped = 0, "", False
    for i, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                return i + 1
    return None


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call with keywords and literals only; None: it is none."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {one.arg: literal(one.value) for one in call.keywords}
        if None in arguments:
            return None
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def literal(node: ast.expr) -> Any:
    """Its value, with JSON's names for constants too. Raises: ValueError for what is no literal."""
    match node:
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                literal(key): literal(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)
