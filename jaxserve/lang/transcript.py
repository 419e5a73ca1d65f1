"""The text of a state: what a program wrote, what the model wrote, and the roles around it."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.lang.expressions import Gen, ProgramError, Select
from jaxserve.types import InvalidRequest


class ProgramCancelled(RuntimeError):
    """The program was cancelled, by `cancel`, an error elsewhere in it, or the backend's end."""


@dataclasses.dataclass(frozen=True)
class Known:
    """Tokens that the engine has computed or generated, and the text that they are."""

    text: str
    token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a gen or select came to."""

    value: Any
    """Of the gen's dtype; else the text."""
    text: str
    meta: Mapping[str, Any]
    known: Known | None
    """What begins the next prompt. None: prompts are to be tokenized as a whole."""


class Variable:
    """A gen or select of a program that runs."""

    def __init__(self, expression: Gen | Select, place: str):
        """`place`: where in the program it stands, for errors."""
        self.expression = expression
        self.place = place
        self.future: concurrent.futures.Future[Result]
        """Set by `start`."""
        self._pieces: list[str] = []
        self._news = threading.Condition()

    def start(self, future: "concurrent.futures.Future[Result]") -> None:
        """`future` is what runs it."""
        self.future = future
        future.add_done_callback(lambda _: self._wake())

    def result(self) -> Result:
        """Waits for it. Raises: what went wrong with it, ProgramCancelled."""
        try:
            return self.future.result()
        except concurrent.futures.CancelledError:
            raise ProgramCancelled("the program was cancelled") from None

    def push(self, piece: str) -> None:
        """More of its text. By the backend's thread."""
        with self._news:
            self._pieces.append(piece)
            self._news.notify_all()

    def pieces(self) -> Iterator[str]:
        """Its text as it comes; all at once where nobody pushed. Raises: as `result`."""
        num_read, length = 0, 0
        is_done = False
        while not is_done:
            with self._news:
                while len(self._pieces) == num_read and not self.future.done():
                    self._news.wait()
                is_done = self.future.done()
                fresh = self._pieces[num_read:]
            num_read += len(fresh)
            for piece in filter(None, fresh):
                length += len(piece)
                yield piece
        if rest := self.result().text[length:]:
            yield rest

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()


Part = str | Variable


def _join(parts: tuple[Part, ...]) -> str:
    """Raises: what went wrong with a variable among them."""
    return "".join(part if isinstance(part, str) else part.result().text for part in parts)


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A state's text up to a point of its program: plain, or messages. Shared by forks, so it never
    changes: every method that adds returns another."""

    messages: tuple[tuple[str, tuple[Part, ...]], ...] = ()
    """(role, content) of those that are closed."""
    role: str | None = None
    """That of the message being written."""
    parts: tuple[Part, ...] = ()
    """Of the message being written; without roles, of all the text."""
    last_variable: Variable | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages) or self.role is not None

    def add(self, part: Part) -> "Transcript":
        """Raises: ProgramError outside a role, where roles are used."""
        if self.messages and self.role is None:
            raise ProgramError("text, gen and select stand in a role once a program has used one")
        if isinstance(part, Variable):
            if self.role not in (None, "assistant"):
                raise ProgramError(f"{part.expression!s} stands in {self.role}(), not assistant()")
            return dataclasses.replace(self, parts=(*self.parts, part), last_variable=part)
        if self.parts and isinstance(self.parts[-1], str):
            return dataclasses.replace(self, parts=(*self.parts[:-1], self.parts[-1] + part))
        return dataclasses.replace(self, parts=(*self.parts, part))

    def open(self, role: str) -> "Transcript":
        """Begins a message. Raises: ProgramError."""
        if self.role is not None:
            raise ProgramError(f"{role}() stands in {self.role}(), which has not ended")
        if self.parts:
            raise ProgramError(f"{role}() comes after text that stands in no role")
        return dataclasses.replace(self, role=role)

    def close(self) -> "Transcript":
        """Ends the message."""
        assert self.role is not None
        closed = (*self.messages, (self.role, self.parts))
        return dataclasses.replace(self, messages=closed, role=None, parts=())

    def conversation(self) -> list[dict[str, str]]:
        """Its messages, with the one being written; waits for what the model writes."""
        messages = [*self.messages]
        if self.role is not None:
            messages.append((self.role, self.parts))
        return [{"role": role, "content": _join(parts)} for role, parts in messages]

    def text(self, template: ChatTemplate | None) -> str:
        """All of it, messages by the chat template; waits for what the model writes.

        An answer being written ends where it is.
        Raises: InvalidRequest without a template, or with what it objects to.
        """
        if not self.is_chat:
            return _join(self.parts)
        if template is None:
            raise InvalidRequest("messages", "the model has no chat template; use no roles")
        if self.role != "assistant":
            return template.render(self.conversation(), add_generation_prompt=False)
        *before, last = self.conversation()
        return template.render(before) + last["content"]
