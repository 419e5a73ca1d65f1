"""Mistral: [TOOL_CALLS] and then a JSON list of calls, or (since v11) name[ARGS]{...} for each."""

from jaxserve.entry.parsers.json_text import CallObject
from jaxserve.entry.parsers.parser import Parser

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(Parser):
    needs_special_tokens = True

    def start(self, ended: bool) -> bool:
        if self._say_until(ended, BEGIN):
            self._state = self.opened
            return True
        return False

    def opened(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if not text:
            self.is_cut = ended
            return False
        if text.startswith("["):
            self._text, self._state = text[1:], self.listed
        else:
            self._state = self.named
        return True

    def listed(self, ended: bool) -> bool:
        """In a list, before a call or its end."""
        text = self._text.lstrip(" \t\r\n,")
        if not text:
            self.is_cut = ended and "," in self._text
            return False
        if text.startswith("{"):
            self._text = text
            self._object = CallObject(self._call, self._arguments)
            self._state = self.inside
        else:
            self._text = text.removeprefix("]")
            self._state = self.start
        return True

    def inside(self, ended: bool) -> bool:
        self._text, done = self._object.take(self._text)
        if not self._object.is_started and (self._object.broken or ended):
            self._say(self._object.raw)
            self.is_cut = not self._object.broken
            self._state = self.start
            return True
        if done:
            self._state = self.listed
        return done

    def named(self, ended: bool) -> bool:
        head, brace, rest = self._text.partition("{")
        if not brace:
            if ended:
                self._say(self._text)
                self._text, self.is_cut = "", True
            return False
        name = head.partition(ARGS)[0].partition(CALL_ID)[0].strip()
        self._call_with(name, "{" + rest, self.start)
        return True
