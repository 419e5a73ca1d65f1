"""The Python API: `LLM` for ordinary code, `AsyncLLM` for asyncio. Imports jax only where the
engine runs.

`LLM` is the asyncio client in a background thread of its own, so that both are the same code.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np

from jaxserve import messages
from jaxserve.config import EngineConfig, MeshConfig
from jaxserve.entry.client import Client
from jaxserve.entry.inputs import Messages, Prompt, list_conversations, list_prompts
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
        self._loop = _LoopThread()
        # Runs once: at close, when this object goes, or at the program's end. Must not hold this
        # object.
        self._finalizer = weakref.finalize(self, _end, self._loop, client)
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
        with _Bar(len(list_prompts(prompts)), progress) as bar:
            return self._call(self._client.generate(prompts, params, on_finish=bar.add, **options))

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
        with _Bar(len(list_conversations(conversations)), progress) as bar:
            return self._call(
                self._client.chat(
                    conversations, params, template=template, on_finish=bar.add, **options
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


class _LoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopping = False
        # A daemon, since the program's end ends it: see `LLM`'s finalizer, which runs after threads
        # are joined.
        self.thread = threading.Thread(target=self._body, name="jaxserve-client", daemon=True)
        self.thread.start()

    def _body(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. When the waiting is interrupted (Ctrl-C), it is cancelled and
        waited for.
        """
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RuntimeError("LLM can't be called from its own callbacks; use AsyncLLM")
        with self._lock:
            if self._stopping:
                coroutine.close()
                raise EngineDead("this LLM was closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDead("this LLM was closed") from None
        except BaseException:
            future.cancel()
            raise

    def later(self, call: Callable[[], object]) -> None:
        """Has the loop call it, unless the loop is ending anyway. From any thread."""
        if not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed in between
                self.loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Ends the loop: what still runs in it is cancelled and waited for."""

        async def cancel_rest() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with self._lock:
            self._stopping = True  # whatever came before is among the tasks by now
        asyncio.run_coroutine_threadsafe(cancel_rest(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def _end(loop: _LoopThread, client: Client) -> None:
    if threading.current_thread() is loop.thread:  # a finalizer may run in any thread
        threading.Thread(target=_end, args=(loop, client), name="jaxserve-end").start()
        return
    try:
        loop.run(client.close())
    finally:
        loop.stop()


def _abandon(loop: _LoopThread, stream: RequestStream) -> None:
    """Ends a stream that nobody reads any more; from any thread, also when the loop has ended."""
    if not stream.finished:
        loop.later(stream.break_off)


class _Bar:
    """A progress bar over finished requests with generated tokens per second; nothing if it isn't
    wanted.
    """

    def __init__(self, total: int, wanted: bool):
        self._progress = None
        self._num_tokens = 0
        if wanted:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=total, rate=0.0)

    def add(self, output: RequestOutput) -> None:
        """Called by the client's thread."""
        if self._progress is None:
            return
        self._num_tokens += output.usage.completion_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed_s if elapsed_s else 0.0
        self._progress.update(self._task, advance=1, rate=rate)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
