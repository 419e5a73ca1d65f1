"""Thinking between <think> and </think>, before the answer."""

from jaxserve.entry.parsers.parser import Content, Parser, Reasoning

BEGIN, END = "<think>", "</think>"


class ThinkTags(Parser):
    """White space around the thinking belongs to neither part."""

    def __init__(self, in_reasoning: bool):
        """`in_reasoning`: the text begins within the thinking, be it with the tag once more."""
        super().__init__()
        self._in_reasoning = in_reasoning
        self._is_first = True

    def start(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if not ended and (not text or (BEGIN.startswith(text) and text != BEGIN)):
            return False
        if text.startswith(BEGIN) or self._in_reasoning:
            self._text = text.removeprefix(BEGIN)
            self._state = self.thinking
        else:
            self._is_first = False
            self._state = self.answer
        return True

    def thinking(self, ended: bool) -> bool:
        before, marker = self._find(END)
        if ended and marker is None:
            before, self._text = before + self._text, ""
        text = self._space + before
        text = text.lstrip() if self._is_first else text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._is_first = False
            self._events.append(Reasoning(certain))
        if marker is not None or ended:
            self._space, self._is_first = "", True
            self._state = self.answer
            return True
        return False

    def answer(self, ended: bool) -> bool:
        text, self._text = self._text, ""
        text = text.lstrip() if self._is_first else text
        if text:
            self._is_first = False
            self._events.append(Content(text))
        return False
