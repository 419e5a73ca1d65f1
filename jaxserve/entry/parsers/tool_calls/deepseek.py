"""DeepSeek: V3 and R1 write a call's type, its name and fenced JSON; V3.1 its name and JSON.

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

All calls stand between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.
"""

from jaxserve.entry.parsers.parser import Parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek(Parser):
    needs_special_tokens = True

    def start(self, ended: bool) -> bool:
        marker = self._say_until(ended, BEGIN, CALL)
        if marker is not None:
            self._state = self.head if marker == CALL else self.between
        return marker is not None

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
            self.is_cut = ended
            return False
        name = before.strip().partition("\n")[0] if kind.strip() == "function" else kind
        self._call_with(name.strip(), "{" + rest, self.between)
        return True
