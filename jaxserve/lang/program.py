"""Programs: ordinary functions of a state, run alone, streamed, or many side by side."""

import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.entry.completion_bar import CompletionBar
from jaxserve.lang.backend import Backend, chosen_backend
from jaxserve.lang.expressions import check_sampling
from jaxserve.lang.state import Execution, State
from jaxserve.types import SamplingParams

NUM_THREADS = 256
"""Programs of a batch that run side by side, where nobody says."""


class Program:
    """A function whose first parameter is a State. Called with a state, it goes on with that."""

    def __init__(self, body: Callable[..., Any]):
        """Raises: TypeError."""
        self.__name__ = getattr(body, "__name__", "program")
        if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
            raise TypeError(f"{self.__name__} is async or a generator; allowed: ordinary functions")
        self._body = body
        state, *self._parameters = inspect.signature(body).parameters.values() or (None,)
        if state is None:
            raise TypeError(f"{self.__name__} takes no state: its first parameter is what it grows")
        self.__doc__ = body.__doc__

    def __call__(self, state: State, /, *arguments: Any, **named: Any) -> Any:
        return self._body(state, *arguments, **named)

    def run(
        self,
        *arguments: Any,
        backend: Backend | None = None,
        stream: bool = False,
        **named: Any,
    ) -> State:
        """Runs the program and returns its finished state.

        `named`: the function's own arguments, and sampling parameters (temperature, max_tokens,
        ...) for what its gens leave open. `stream`: returns at once; the program runs in a thread,
        and the state's `text_iter` tells a variable's text as it is written.
        Raises: what the program raises; what went wrong with a gen, unless the program caught it.
        """
        own, sampling = self._split(named)
        execution = Execution(chosen_backend(backend), sampling, streams=stream)
        state = State(execution)
        if not stream:
            execution.thread = threading.current_thread()
            self._run(state, execution, arguments, own)
            return state
        execution.thread = threading.Thread(
            target=self._run_aside,
            args=(state, execution, arguments, own),
            name="jaxserve-program",
            daemon=True,
        )
        execution.thread.start()
        return state

    def run_batch(
        self,
        batch: Iterable[Mapping[str, Any]],
        *,
        backend: Backend | None = None,
        num_threads: int | None = None,
        progress_bar: bool = False,
        **sampling: Any,
    ) -> list[State]:
        """Runs the program once with each item's arguments, `num_threads` at a time (default: 256);
        finished states in their order.

        `progress_bar` shows one with tokens/s on standard error. `sampling`: as `run` has it.
        Raises: the first error, which cancels the rest.
        """
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; allowed: 1 or more")
        items = list(batch)
        for index, named in enumerate(items):
            if not isinstance(named, Mapping):
                kind = type(named).__name__
                raise TypeError(f"item {index} is a {kind}; allowed: arguments by name, a dict")
        if not items:
            return []
        chosen = chosen_backend(backend)
        _, sampling = self._split(sampling, own=False)
        executions = [Execution(chosen, sampling) for _ in items]

        def run_one(execution: Execution, named: Mapping[str, Any]) -> State:
            state = State(execution)
            execution.thread = threading.current_thread()
            self._run(state, execution, (), named)
            return state

        with (
            CompletionBar(len(items), progress_bar) as bar,
            concurrent.futures.ThreadPoolExecutor(
                min(num_threads or NUM_THREADS, len(items)), "jaxserve-program"
            ) as threads,
        ):
            futures = {
                threads.submit(run_one, execution, named): execution
                for execution, named in zip(executions, items, strict=True)
            }
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    bar.add(futures[future].num_tokens)
            except BaseException:
                for future, execution in futures.items():
                    future.cancel()
                    execution.cancel()
                raise
        return [future.result() for future in futures]

    def _run(
        self, state: State, execution: Execution, arguments: Sequence[Any], own: Mapping[str, Any]
    ) -> None:
        try:
            state.returned = self._body(state, *arguments, **own)
            execution.finish()
        except BaseException as error:
            execution.end(error)
            raise
        execution.end(None)

    def _run_aside(self, state: State, execution: Execution, *rest: Any) -> None:
        try:
            self._run(state, execution, *rest)
        except BaseException:  # whoever reads the state is told
            return

    def _split(
        self, named: Mapping[str, Any], own: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the function's arguments, sampling parameters). Raises: TypeError, InvalidRequest."""
        takes_all = any(one.kind is one.VAR_KEYWORD for one in self._parameters)
        names = {one.name for one in self._parameters} if own else set()
        fields = SamplingParams.__struct_fields__
        sampling = {n: v for n, v in named.items() if n not in names and n in fields}
        others = {n: v for n, v in named.items() if n not in sampling}
        for name in others.keys() - names:
            if not (own and takes_all):
                raise TypeError(
                    f"{name} is neither an argument of {self.__name__} nor a sampling parameter"
                )
        check_sampling(sampling)
        if sampling:
            SamplingParams(**sampling)
        return others, sampling


def function(body: Callable[..., Any]) -> Program:
    """Makes a program of a function whose first parameter is the state it appends to."""
    return Program(body)
