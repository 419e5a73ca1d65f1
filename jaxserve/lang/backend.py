"""What programs run on, and the backend that is taken where none is named."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.loop_thread import LoopThread
from jaxserve.types import ChosenLogprob, FinishReason, SamplingParams, Usage

DEFAULT_MAX_TOKENS = 128
"""Of a gen that doesn't say."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """A finished request."""

    text: str
    text_ids: list[int] | None
    """The tokens that are `text`; None where a stop string cut it."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    logprobs: list[ChosenLogprob] | None


@dataclasses.dataclass(frozen=True)
class Scored:
    """Log-probabilities, natural, after a prompt's start."""

    logprobs: list[float]
    """Of the prompt's tokens after the start."""
    named: list[float]
    """Of the tokens asked for, each as the one after the prompt."""
    usage: Usage


class Backend(abc.ABC):
    """An engine for programs. The coroutines run in its loop, a thread of its own."""

    def __init__(self):
        self.loop = LoopThread()

    @property
    @abc.abstractmethod
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    @abc.abstractmethod
    def joins_tokens(self) -> bool:
        """A text's tokens may be those of its parts, one after the other. Not where the first of a
        text stands for a space before it."""

    @abc.abstractmethod
    async def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abc.abstractmethod
    async def generate(
        self, token_ids: list[int], params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> Generated:
        """Completes a prompt; `on_text` hears each piece of the text. Cancelling this ends the
        request.

        Raises: InvalidRequest, RequestFailed, EngineDead.
        """

    @abc.abstractmethod
    async def score(
        self, prompts: list[list[int]], start: int, named: Sequence[int]
    ) -> list[Scored]:
        """Log-probabilities of each prompt's tokens after that at `start`, all prompts at once, and
        of `named`, at most 128 token ids, after the prompt. Raises: as `generate`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it and whatever still runs. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def text_ids(
    token_ids: list[int],
    finish_reason: FinishReason,
    stop_reason: str | int | None,
    ends: frozenset[int],
) -> list[int] | None:
    """Generated tokens without the one of `ends` that ended them, which is no text; None where a
    stop string cut the text."""
    if isinstance(stop_reason, str):
        return None
    if finish_reason == "stop" and token_ids and token_ids[-1] in ends:
        return token_ids[:-1]
    return token_ids


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """What programs run on from now on where `run` names no backend; None: nothing."""
    # Of the process: programs are called from many threads.
    _Default.backend = _checked(backend)


def chosen_backend(backend: Backend | None) -> Backend:
    """Raises: ValueError if there is none, TypeError if it is no backend."""
    found = _checked(backend) or _Default.backend
    if found is None:
        raise ValueError("there is no backend: set_default_backend(Runtime(...)), or run(backend=)")
    return found


def _checked(backend: Any) -> Backend | None:
    if backend is None or isinstance(backend, Backend):
        return backend
    kind = type(backend).__name__
    raise TypeError(f"backend is a {kind}; allowed: Runtime(model), RuntimeEndpoint(url)")
