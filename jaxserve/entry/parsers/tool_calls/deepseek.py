"""DeepSeek: V3 and R1 write a call's type, its name and fenced JSON; V3.1 its name and JSON.

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

All calls stand between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.
"""

from jaxserve.entry.parsers.json_text import JsonValue
from jaxserve.entry.parsers.parser import Parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek(Parser):
    needs_special_tokens = True

    def start(self, ended: bool) -> bool:
        before, marker = self._find(BEGIN, CALL)
        self._say(before)
        if marker is not None:
            self._state = self.head if marker == CALL else self.between
            return True
        if ended:
            self._say(self._text)
            self._text = ""
        return False

    def between(self, ended: bool) -> bool:
        _, marker = self._find(CALL, END)
        if marker is not None:
            self._state = self.head if marker == CALL else self.start
        return marker is not None

    def head(self, ended: bool) -> bool:
        """Type or name, the separator, and all before the arguments."""
        kind, separator, rest = self._text.partition(SEPARATOR)
        before, brace, rest = rest.partition("{")
        if not separator or not brace:
            return False
        name = before.strip().partition("\n")[0] if kind.strip() == "function" else kind
        self._call(name.strip())
        self._value, self._text, self._state = JsonValue(), "{" + rest, self.arguments
        return True

    def arguments(self, ended: bool) -> bool:
        taken, done = self._value.take(self._text)
        self._arguments(taken)
        self._text = self._text[len(taken) :]
        if done:
            self._state = self.between
        return done
