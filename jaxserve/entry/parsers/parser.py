"""What a model's text is made of, and the machine that all parsers of it are. Imports no jax.

A parser is fed text in any pieces and gives events; what they say together does not depend on the
pieces. It takes text away from its front only when it is certain what that text is.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import ClassVar

from jaxserve.entry.parsers.json_text import JsonValue


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments; all of them together are JSON."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
State = Callable[[bool], bool]


class Parser:
    """A state machine over `_text`, what has come and is not understood yet.

    A state is a method that is told whether the text has ended, and says whether it took anything
    or changed the state; it is run until it did not.
    """

    needs_special_tokens: ClassVar[bool] = False
    """The format is written with special tokens, which must be in the text then."""

    def __init__(self, names: Collection[str] = ()):
        """`names`: the tools there are."""
        self._names = frozenset(names)
        self._text = ""
        self._events: list[Event] = []
        self._space = ""
        """White space that is content only if more content follows."""
        self._num_calls = 0
        self._state: State = self.start
        self.is_cut = False
        """The text ended where a call had begun that is not told yet. Known after `finish`."""

    def start(self, ended: bool) -> bool:
        """The first state."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        """What is certain with this piece."""
        self._text += text
        return self._run(False)

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        events = self._run(True)
        if self._space and not self._num_calls:
            events.append(Content(self._space))
        return events

    def _run(self, ended: bool) -> list[Event]:
        while self._state(ended):
            pass
        events, self._events = self._events, []
        return events

    # What states are made of

    def _find(self, *markers: str) -> tuple[str, str | None]:
        """Takes the text before the first of the markers, and it; without one, the text that can't
        be the beginning of one.
        """
        found = [(at, m) for m in markers if (at := self._text.find(m)) >= 0]
        if found:
            at, marker = min(found)
            before, self._text = self._text[:at], self._text[at + len(marker) :]
            return before, marker
        held = max(overlap(self._text, marker) for marker in markers)
        before = self._text[: len(self._text) - held]
        self._text = self._text[len(self._text) - held :]
        return before, None

    def _skip_space(self) -> None:
        self._text = self._text.lstrip()

    def _say(self, text: str) -> None:
        """Content, but for white space at its end, which waits."""
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._events.append(Content(certain))

    def _say_until(self, ended: bool, *markers: str) -> str | None:
        """Says and takes the text before the first of the markers, and takes it; None: there is
        none yet.
        """
        before, marker = self._find(*markers)
        self._say(before)
        if marker is None and ended:
            self._say(self._text)
            self._text = ""
        return marker

    def _call(self, name: str) -> None:
        self._space = ""
        self._events.append(CallStart(self._num_calls, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if self._events and isinstance(last := self._events[-1], CallArguments):
            text = last.text + text
            self._events.pop()
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def _call_with(self, name: str, text: str, then: State) -> None:
        """A call whose arguments the rest, `text`, begins with; `then`: the state after them."""
        self._call(name)
        self._text, self._value, self._then = text, JsonValue(), then
        self._state = self.arguments

    def arguments(self, ended: bool) -> bool:
        """The state of arguments that are written as JSON."""
        taken, done = self._value.take(self._text)
        self._arguments(taken)
        self._text = self._text[len(taken) :]
        if done:
            self._state = self._then
        return done

    def plain(self, ended: bool) -> bool:
        """The state of text in which no call can come any more."""
        self._say(self._text)
        self._text = ""
        return False


def overlap(text: str, marker: str) -> int:
    """How many of the text's last characters are the marker's first."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
