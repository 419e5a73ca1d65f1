"""The state of a program that runs: it grows by `+=`, and what the model writes is read from it.

A gen is sent when it is appended, and runs while the program goes on; only reading waits for it.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from jaxserve.lang.backend import Backend
from jaxserve.lang.expressions import Expression, Gen, Joined, Role, Select
from jaxserve.lang.interpreter import evaluate
from jaxserve.lang.transcript import ProgramCancelled, Result, Transcript, Variable

type Appended = Variable | list[Appended | None]
"""What is under a name; of joined forks a list, None where a fork has none of that name."""


class Execution:
    """One run of a program: its requests, shared by the state and its forks."""

    def __init__(self, backend: Backend, sampling: Mapping[str, Any], *, streams: bool = False):
        """`sampling`: parameters for what its gens leave open. `streams`: pieces of text are
        told."""
        self._backend = backend
        self._sampling = sampling
        self._streams = streams
        self.news = threading.Condition()
        """Told when a variable is appended, and at the end."""
        self.thread: threading.Thread | None = None
        """What runs the program, until it has ended."""
        self.error: BaseException | None = None
        """That ended it."""
        self._variables: list[Variable] = []
        self._told: list[Exception] = []
        """Errors that the program has had."""
        self._is_cancelled = False

    def append(
        self, transcript: Transcript, expression: Gen | Select
    ) -> tuple[Variable, Transcript]:
        """Sends what comes at the transcript's end; returns it, and the transcript with it.

        Raises: ProgramError, ProgramCancelled, EngineDead.
        """
        variable = Variable(expression, _place())
        grown = transcript.add(variable)
        with self.news:
            if self._is_cancelled:
                error = ProgramCancelled("the program was cancelled")
                self._tell(error)
                raise error
            variable.start(self._backend.loop.submit(self._evaluate(transcript, variable)))
            self._variables.append(variable)
        return variable, grown

    async def _evaluate(self, transcript: Transcript, variable: Variable) -> Result:
        if transcript.last_variable is not None:  # whose error is this one's too
            await asyncio.shield(asyncio.wrap_future(transcript.last_variable.future))
        on_text = variable.push if self._streams else None
        try:
            return await evaluate(self._backend, transcript, variable, self._sampling, on_text)
        except Exception as error:  # raised again, with the program's line
            error.add_note(f"in the program: {variable.expression!s} at {variable.place}")
            raise

    def result(self, variable: Variable) -> Result:
        """Waits for it. Raises: what went wrong with it, ProgramCancelled."""
        try:
            return variable.result()
        except Exception as error:  # raised again; noted that the program has had it
            self._tell(error)
            raise

    def pieces(self, variable: Variable) -> Iterator[str]:
        """Its text as it comes. Raises: as `result`."""
        try:
            yield from variable.pieces()
        except Exception as error:  # as above
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        """Notes an error that is raised to whoever reads; where others than the program may, only
        what its own thread is told counts.
        """
        if not self._streams or threading.current_thread() is self.thread:
            self._told.append(error)

    def _was_told(self, error: Exception) -> bool:
        """Whether the program has had the error; all cancellations are one."""
        if isinstance(error, ProgramCancelled):
            return any(isinstance(one, ProgramCancelled) for one in self._told)
        return any(one is error for one in self._told)

    def text(self, transcript: Transcript) -> str:
        if transcript.last_variable is not None:
            self.result(transcript.last_variable)
        return transcript.text(self._backend.chat_template if transcript.is_chat else None)

    def finish(self) -> None:
        """Waits for all that was sent. Raises: the first error that the program has not had."""
        for variable in self._variables:
            try:
                variable.result()
            except Exception as error:  # raised again, unless the program has had it
                if not self._was_told(error):
                    raise

    def end(self, error: BaseException | None) -> None:
        """The program has ended, with this error; nothing of it goes on then."""
        if error is not None:
            self.cancel()
        with self.news:
            self.error = error
            self.thread = None
            self.news.notify_all()

    def cancel(self) -> None:
        """Ends all requests, and refuses others."""
        with self.news:
            self._is_cancelled = True
        for variable in self._variables:
            variable.future.cancel()

    @property
    def num_tokens(self) -> int:
        """That it generated; once it has finished."""
        futures = [v.future for v in self._variables if not v.future.cancelled()]
        metas = [future.result().meta for future in futures if not future.exception()]
        return sum(meta.get("completion_tokens", 0) for meta in metas)


class State:
    """What a program appends to and reads from.

    Reading waits for what the model writes, and raises what went wrong with it.
    """

    def __init__(self, execution: Execution, transcript: Transcript | None = None):
        self._execution = execution
        self._transcript = transcript or Transcript()
        self._variables: dict[str, Appended] = {}
        """By name."""
        self.returned: Any = None
        """What the program returned."""

    def __iadd__(self, value: str | Expression) -> Self:
        match value:
            case str():
                self._transcript = self._transcript.add(value)
            case Gen() | Select():
                variable, self._transcript = self._execution.append(self._transcript, value)
                if value.name is not None:
                    self._set(value.name, variable)
            case Joined(parts):
                for part in parts:
                    self += part
            case Role(role, content):
                with self._role(role):
                    self += content
            case _:
                kind = type(value).__name__
                raise TypeError(f"{kind} can't be appended; allowed: text, gen, select, roles")
        return self

    def system(self) -> contextlib.AbstractContextManager[None]:
        """What is appended within `with` is a system message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        """What is appended within `with` is a user's message."""
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        """What is appended within `with` is an answer."""
        return self._role("assistant")

    @contextlib.contextmanager
    def _role(self, role: str) -> Iterator[None]:
        self._transcript = self._transcript.open(role)
        try:
            yield
        finally:
            self._transcript = self._transcript.close()

    def fork(self, count: int = 1) -> "Forks":
        """States that go on from here, side by side; what they share is computed once."""
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count is {count!r}; allowed: 1 or more")
        return Forks(self, [self._fork() for _ in range(count)])

    def _fork(self) -> "State":
        state = State(self._execution, self._transcript)
        state._variables = dict(self._variables)
        return state

    def __getitem__(self, name: str) -> Any:
        """A variable's value: its text, or what its dtype says; of joined forks a list.

        Raises: KeyError; what went wrong with it.
        """
        return self._read(name, lambda variable: self._execution.result(variable).value)

    def get_meta(self, name: str) -> Any:
        """What is known of a variable: finish_reason, numbers of tokens, logprobs where asked for;
        of a select each choice's score. Of joined forks a list. Raises: as reading it."""
        return self._read(name, lambda variable: dict(self._execution.result(variable).meta))

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def _read(self, name: str, read: Any) -> Any:
        def values(found: Appended) -> Any:
            if isinstance(found, Variable):
                return read(found)
            return [None if one is None else values(one) for one in found]

        return values(self._find(name))

    def _find(self, name: str) -> Appended:
        execution = self._execution
        with execution.news:
            execution.news.wait_for(
                lambda: (
                    name in self._variables
                    or execution.thread in (None, threading.current_thread())
                )
            )
        if name not in self._variables:
            if execution.error is not None:
                raise execution.error
            raise KeyError(f"{name!r}; there are {', '.join(self._variables) or 'none'}")
        return self._variables[name]

    def _set(self, name: str, variable: Appended) -> None:
        with self._execution.news:
            self._variables[name] = variable
            self._execution.news.notify_all()

    def text(self) -> str:
        """All text so far, with the chat template's marks where roles are used."""
        return self._execution.text(self._transcript)

    def messages(self) -> list[dict[str, str]]:
        """The messages so far, {"role", "content"} each."""
        self.sync()
        return self._transcript.conversation() if self._transcript.is_chat else []

    def sync(self) -> None:
        """Waits for all that was appended so far. Raises: what went wrong with it."""
        if self._transcript.last_variable is not None:
            self._execution.result(self._transcript.last_variable)

    def text_iter(self, name: str) -> Iterator[str]:
        """A variable's text as it is written, where the program was run with `stream=True`; else
        all at once. Raises: as reading it."""
        found = self._find(name)
        if not isinstance(found, Variable):
            raise ValueError(f"{name!r} is of joined forks; iterate over theirs")
        return self._execution.pieces(found)

    async def text_async_iter(self, name: str) -> AsyncIterator[str]:
        """As `text_iter`, for asyncio code."""
        pieces = await asyncio.to_thread(self.text_iter, name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def wait(self) -> Self:
        """Waits until a program run with `stream=True` has ended. Raises: the error that ended
        it."""
        execution = self._execution
        with execution.news:
            execution.news.wait_for(lambda: execution.thread is None)
        if execution.error is not None:
            raise execution.error
        return self

    def cancel(self) -> None:
        """Ends the program's requests; reading what they would have written raises
        ProgramCancelled."""
        self._execution.cancel()


class Forks(Sequence[State]):
    """Forked states; `+=` appends to each."""

    def __init__(self, parent: State, states: Sequence[State]):
        self._parent = parent
        self._states = states
        self._before = dict(parent._variables)

    def __getitem__(self, index: Any) -> Any:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        # what Python does after `forks[i] += ...`
        if state is not self._states[index]:
            raise TypeError("a fork can't be replaced")

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(self, value: str | Expression) -> Self:
        for state in self._states:
            state += value
        return self

    def join(self) -> None:
        """Waits for all. The state that was forked then has each variable that any of them set, as
        a list of theirs. Raises: what went wrong with the first that failed."""
        for state in self._states:
            state.sync()
        names: dict[str, None] = {}
        for state in self._states:
            names |= {n: None for n, v in state._variables.items() if self._before.get(n) is not v}
        for name in names:
            self._parent._set(name, [state._variables.get(name) for state in self._states])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.join()


def _place() -> str:
    """The line of the program that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
