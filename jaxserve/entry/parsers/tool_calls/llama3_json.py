"""Llama 3: the answer is {"name": ..., "parameters": {...}}, several with ; between them.

An answer may be JSON without being a call: only names of tools make it one.
"""

from jaxserve.entry.parsers.json_text import CallObject
from jaxserve.entry.parsers.parser import Parser

TAG = "<|python_tag|>"


class Llama3Json(Parser):
    needs_special_tokens = True

    def start(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if not ended and (not text or TAG.startswith(text)) and text != TAG:
            return False
        self._lead = self._text[: len(self._text) - len(text)]
        if text.startswith(TAG):
            self._lead += TAG
            self._text = text.removeprefix(TAG)
            self._state = self.between
            return True
        self._text = text
        self._state = self.between
        return True

    def between(self, ended: bool) -> bool:
        """Where a call may begin."""
        separators = " \t\r\n;," if self._num_calls else " \t\r\n"
        text = self._text.lstrip(separators)
        if not text and not ended:
            return False
        if text.startswith("{"):
            if not self._num_calls:
                self._lead += self._text[: len(self._text) - len(text)]
            self._text = text
            self._object = CallObject(self._call, self._arguments, self._names)
            self._state = self.inside
            return True
        if self._num_calls:
            self.is_cut = not text and bool(self._text.strip())
            self._text = text
        else:
            self._text = self._lead.replace(TAG, "") + self._text
        self._state = self.plain
        return True

    def inside(self, ended: bool) -> bool:
        self._text, done = self._object.take(self._text)
        if self._object.broken and not self._object.is_started:
            self._give_up()
            return True
        if done:
            self._state = self.between
            return True
        if ended and not self._object.is_started:
            self._give_up()
            self.is_cut = True
            return True
        return False

    def _give_up(self) -> None:
        lead = "" if self._num_calls else self._lead.replace(TAG, "")
        self._text = lead + self._object.raw + self._text
        self._state = self.plain
