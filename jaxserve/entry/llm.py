"""The Python API: `LLM` for ordinary code, `AsyncLLM` for asyncio. Imports jax only where the
engine runs.

`LLM` is the asyncio client in a background thread of its own, so that both are the same code.
"""

import dataclasses
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np

from jaxserve import messages
from jaxserve.config import EngineConfig, MeshConfig
from jaxserve.entry.client import Client
from jaxserve.entry.completion_bar import CompletionBar
from jaxserve.entry.inputs import Messages, Prompt, list_conversations, list_prompts
from jaxserve.entry.loop_thread import LoopThread, end_loop
from jaxserve.entry.request_stream import Observer, RequestStream
from jaxserve.types import (
    ConfigError,
    Delta,
    EngineDead,
    EngineInfo,
    EngineStats,
    Pooling,
    RequestOutput,
    SamplingParams,
)

T = TypeVar("T")


def make_config(model: str | EngineConfig | None, fields: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments; those of its mesh may stand beside the others
    (`tensor=2`).

    Raises: ConfigError, for an unknown name too.
    """
    if isinstance(model, EngineConfig):
        if fields:
            raise ConfigError(f"{', '.join(fields)}: can't be given beside an EngineConfig")
        return model
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    axes = {field.name for field in dataclasses.fields(MeshConfig)}
    for name in fields:
        if name not in known | axes:
            raise ConfigError(f"{name} is no setting; known are {', '.join(sorted(known | axes))}")
    settings = {name: value for name, value in fields.items() if name in known}
    sizes = {name: value for name, value in fields.items() if name in axes}
    if sizes:
        if "mesh" in settings:
            raise ConfigError(f"{', '.join(sizes)}: can't be given beside mesh")
        settings["mesh"] = MeshConfig(**sizes)
    if model is not None:
        settings["model"] = model
    return EngineConfig(**settings)


class AsyncLLM(Client):
    """An engine of one model, for asyncio code: the verbs of `LLM`, awaited. Made anywhere, used
    within one loop.

    The engine starts with the first call, or with `start` or `async with`; `close` ends it.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        process: Literal["thread", "spawn"] = "thread",
        observer: Observer | None = None,
        on_progress: Callable[[messages.Progress], None] | None = None,
        start_engine: Any = None,
        load_model: Any = None,
        **settings: Any,
    ):
        """`model` and `settings`: as `LLM` has them."""
        others = {"load_model": load_model} if load_model is not None else {}
        super().__init__(
            make_config(model, settings),
            process=process,
            observer=observer,
            on_progress=on_progress,
            start_engine=start_engine,
            **others,
        )


class LLM:
    """An engine of one model, for ordinary code: every call waits for its answer. May be used from
    several threads.

    `close` ends the engine, and so do leaving a `with` block, losing the last reference, and the
    end of the program.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        process: Literal["thread", "spawn"] = "thread",
        on_progress: Callable[[messages.Progress], None] | None = None,
        start_engine: Any = None,
        load_model: Any = None,
        **settings: Any,
    ):
        """Loads and compiles; returns when the engine is ready.

        `model`: a pulled model's name, a .gguf file, a Hugging Face folder or a converted one.
        `settings`: fields of EngineConfig, and of its MeshConfig (`tensor=2`). `process`: whether
        the engine runs in a thread here or in a process of its own.
        Raises: ConfigError, CheckpointError, UnsupportedModel, EngineDead.
        """
        client = AsyncLLM(
            model,
            process=process,
            on_progress=on_progress,
            start_engine=start_engine,
            load_model=load_model,
            **settings,
        )
        self._client = client
        self._loop = LoopThread()
        # Runs once: at close, when this object goes, or at the program's end. Must not hold this
        # object.
        self._finalizer = weakref.finalize(self, end_loop, self._loop, client.close)
        try:
            self._loop.run(client.start())
        except BaseException:
            self._finalizer()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def config(self) -> EngineConfig:
        return self._client.config

    def stats(self) -> EngineStats:
        """The engine's counters, as it last told them."""
        return self._client.stats()

    def health(self) -> None:
        """Raises: EngineDead, saying why, unless the engine is running."""
        self._client.health()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, each with its own params or all with the same; results in
        the prompts' order.

        A prompt is a string or a list of token ids. `progress` shows a bar with tokens/s on
        standard error. `options`: priority, cache_salt.
        Raises: InvalidRequest before anything runs, if any of them can't be served; RequestFailed,
        EngineDead.
        """
        with CompletionBar(len(list_prompts(prompts)), progress) as bar:
            return self._call(
                self._client.generate(prompts, params, on_finish=bar.add_output, **options)
            )

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}) or many; else as `generate`.

        `template`: further variables for the model's chat template.
        """
        with CompletionBar(len(list_conversations(conversations)), progress) as bar:
            return self._call(
                self._client.chat(
                    conversations, params, template=template, on_finish=bar.add_output, **options
                )
            )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[Delta, None, None]:
        """Completes one prompt, delta by delta. Closing the generator, or leaving its loop, ends
        the request.

        Raises: InvalidRequest at the call, RequestFailed and EngineDead while iterating.
        """
        opened: list[RequestStream] = []

        async def opening() -> None:
            opened.append(await self._client.open(prompt, params, **options))

        try:
            self._call(opening())
        except BaseException:
            # Ctrl-C may come when the request has been sent already.
            self._loop.later(lambda: [stream.break_off() for stream in opened])
            raise
        return self._deltas(opened[0])

    def chat_stream(
        self,
        conversation: Messages,
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generator[Delta, None, None]:
        """Answers one conversation, delta by delta, as `stream` does."""
        prompt = self._call(self._client.chat_prompt(conversation, **(template or {})))
        return self.stream(prompt, params, **options)

    def _deltas(self, stream: RequestStream) -> Generator[Delta, None, None]:
        # A generator that was never begun runs no `finally`; the finalizer covers that.
        deltas = self._iterate(stream)
        weakref.finalize(deltas, _abandon, self._loop, stream).atexit = False
        return deltas

    def _iterate(self, stream: RequestStream) -> Generator[Delta, None, None]:
        async def following() -> Delta | None:
            return await anext(stream, None)

        try:
            while (delta := self._call(following())) is not None:
                yield delta
        finally:
            _abandon(self._loop, stream)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Any,
    ) -> list[np.ndarray]:
        """One vector, f32[D], for each prompt: its hidden states after the model's last norm,
        pooled, and scaled to length 1 unless `normalize` is false.

        Raises: InvalidRequest unless the engine runs with `embeddings=True`.
        """
        return self._call(
            self._client.embed(prompts, pooling=pooling, normalize=normalize, **options)
        )

    def abort(self, request_id: str) -> bool:
        """Ends a request: whoever reads it gets what there is, with finish_reason `abort`. False:
        it isn't running.
        """
        return self._call(self._client.abort(request_id))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._call(self._client.tokenize(text, add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._call(self._client.detokenize(token_ids, skip_special_tokens))

    def flush_cache(self) -> None:
        """Drops every cached prefix that no running sequence uses."""
        self._call(self._client.flush_cache())

    def close(self) -> None:
        """Ends the engine and whatever still runs. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            coroutine.close()
            raise EngineDead("this LLM was closed")
        return self._loop.run(coroutine)


def _abandon(loop: LoopThread, stream: RequestStream) -> None:
    """Ends a stream that nobody reads any more; from any thread, also when the loop has ended."""
    if not stream.finished:
        loop.later(stream.break_off)
