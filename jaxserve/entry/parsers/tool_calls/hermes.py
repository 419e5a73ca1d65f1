"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one tag a call."""

from jaxserve.entry.parsers.json_text import CallObject
from jaxserve.entry.parsers.parser import Parser

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Parser):
    """A tag that holds no call is content."""

    def start(self, ended: bool) -> bool:
        if self._say_until(ended, BEGIN):
            self._object = CallObject(self._call, self._arguments)
            self._state = self.inside
            return True
        return False

    def inside(self, ended: bool) -> bool:
        self._text, done = self._object.take(self._text)
        if self._object.broken and not self._object.is_started:
            self._text = self._object.raw + self._text
            self._say(BEGIN)
            self._state = self.start
            return True
        if done:
            self._state = self.close
            return True
        if ended and not self._object.is_started:
            self._say(BEGIN + self._object.raw)
            self.is_cut = True
        return False

    def close(self, ended: bool) -> bool:
        _, marker = self._find(END, BEGIN)
        if marker == BEGIN:  # the end was forgotten
            self._text = BEGIN + self._text
        if marker is not None:
            self._state = self.start
        return marker is not None
