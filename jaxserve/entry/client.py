"""The asyncio client of one engine: text and parameters in, text out, piece by piece. No jax here.

One task (`_pump`) reads the engine's messages and hands each to the request that it belongs to.
Whoever stops reading a request, however that happens, ends it in the engine too.
"""

import asyncio
import functools
import logging
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np

from jaxserve import messages
from jaxserve.config import EngineConfig
from jaxserve.entry import search
from jaxserve.entry.detokenizer import Detokenizer, StopAutomaton
from jaxserve.entry.engine_view import EngineView
from jaxserve.entry.inputs import (
    Messages,
    Prompt,
    check_options,
    check_search,
    check_token_ids,
    choice_seed,
    for_choice,
    list_conversations,
    list_params,
    list_prompts,
    resolve_sampling,
    truncate_prompt,
)
from jaxserve.entry.rate import RateMeter
from jaxserve.entry.request_stream import (
    ChoiceState,
    NoObserver,
    Observer,
    RequestStream,
    Until,
    chosen_logprobs,
)
from jaxserve.entry.stop_patterns import compile_patterns
from jaxserve.entry.text_model import TextModel, load_text_model
from jaxserve.entry.tokenizer import LONG_TEXT, Tokenizer
from jaxserve.observation import EngineState
from jaxserve.types import (
    CheckpointError,
    ConfigError,
    Delta,
    EngineDead,
    EngineInfo,
    EngineStats,
    InvalidRequest,
    Pooling,
    QueueFull,
    Request,
    RequestFailed,
    RequestOutput,
    SamplingParams,
    TokenOutput,
    TokenSampling,
    UnsupportedModel,
)

__all__ = [
    "Client",
    "Messages",
    "Observer",
    "Prompt",
    "RequestStream",
    "TextModel",
    "Until",
    "load_text_model",
]

log = logging.getLogger(__name__)
request_log = logging.getLogger("jaxserve.requests")

_LAST_WORDS_S = 0.2
"""How long an engine that has ended may leave the reason unread in the link."""
_STOP_S = 5.0
"""How long an engine may take to say that it has stopped, after its grace."""
_USER_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, UnsupportedModel)
}

EMBEDDING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
"""What a request for an embedding samples: a token that nobody sees."""

Prepared = tuple[list[int], SamplingParams, TokenSampling]


class EngineHandle(Protocol):
    """A started engine, as `jaxserve.engine.process.start_engine` returns it."""

    client_end: messages.ClientEnd
    exited: asyncio.Future[int]

    async def close(self, grace_s: float = 0.0, *, at_once: bool = False) -> None: ...


class StartEngine(Protocol):
    async def __call__(
        self, config: EngineConfig, process: Literal["thread", "spawn"]
    ) -> EngineHandle: ...


class Client:
    """Serves requests from one engine. Used within one asyncio loop.

    The engine starts with `start`, or with the first verb. Every verb raises EngineDead once the
    engine has ended, whatever ended it, and InvalidRequest (ContextExceeded) for what the user got
    wrong, before anything is sent to the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        process: Literal["thread", "spawn"] = "spawn",
        observer: Observer | None = None,
        on_progress: Callable[[messages.Progress], None] | None = None,
        start_engine: StartEngine | None = None,
        load_model: Callable[[str], TextModel] = load_text_model,
    ):
        """`on_progress` hears what start-up is doing. The last two replace the real ones."""
        if process not in ("thread", "spawn"):
            raise ConfigError(f"process is {process!r}; allowed: thread, spawn")
        self.config = config
        self._process: Literal["thread", "spawn"] = process
        self._observer: Observer = observer or NoObserver()
        self._on_progress = on_progress
        self._start_engine = start_engine
        self._load_model = load_model
        self._starting: asyncio.Task[None] | None = None
        self._handle: EngineHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._model: TextModel | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._generated = RateMeter()
        self._choices: dict[str, ChoiceState] = {}
        """In flight, by wire id."""
        self._streams: dict[str, RequestStream] = {}
        self._view = EngineView(self._ask_state)
        self._room = asyncio.Event()
        self._death: str | None = None
        self._died = asyncio.Event()
        self._closing = False

    # Life

    async def start(self) -> Self:
        """Starts the engine and waits until it is ready. Safe to call from many tasks, and again.

        Raises: CheckpointError, UnsupportedModel, ConfigError as the engine found them, else
        EngineDead.
        """
        self._check_alive()
        if self._info is None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(self._start())
            # Shielded: the start goes on for the others when one that waits for it is cancelled.
            await asyncio.shield(self._starting)
        return self

    async def _start(self) -> None:
        loading = asyncio.ensure_future(asyncio.to_thread(self._load_model, self.config.model))
        try:
            start_engine = self._start_engine
            if start_engine is None:
                from jaxserve.engine.process import (
                    start_engine,  # an engine's side; fakes need none
                )
            self._handle = await start_engine(self.config, self._process)
            info = await self._await_ready(self._handle, loading)
            self._model = await loading
            _compare_vocabularies(self._model, info)
            if self._model.tokenizer is not None:
                self._handle.client_end.send(
                    messages.Vocabulary(
                        self._model.tokenizer.to_json(), sorted(self._model.eos_token_ids)
                    )
                )
        except BaseException as error:
            loading.cancel()
            self._closing = True  # raised here, so not logged as well
            self._die(f"the engine did not start: {error}")
            if self._handle is not None:
                await self._handle.close(at_once=True)
            raise
        self._info = info
        pump = asyncio.ensure_future(self._pump(self._handle.client_end))
        self._tasks = [pump, asyncio.ensure_future(self._watch(self._handle, pump))]

    async def _await_ready(
        self, handle: EngineHandle, loading: asyncio.Future[TextModel]
    ) -> EngineInfo:
        """Reads messages until the engine is ready, or ends, or the text model can't be loaded."""
        exited = False
        receiving: asyncio.Future[messages.FromEngine] | None = None
        try:
            while True:
                receiving = receiving or asyncio.ensure_future(handle.client_end.receive())
                waiting: set[asyncio.Future[Any]] = {receiving}
                waiting |= {future for future in (loading, handle.exited) if not future.done()}
                # An engine that has ended may have left its last words in the link.
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=_LAST_WORDS_S if exited else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if loading.done():
                    loading.result()  # raises what was wrong
                if receiving in done:
                    message, receiving = receiving.result(), None
                    match message:
                        case messages.Progress():
                            log.info("%s: %s", message.stage, message.text)
                            if self._on_progress is not None:
                                self._on_progress(message)
                        case messages.Ready():
                            return message.info
                        case messages.Fatal():
                            raise _start_error(message)
                        case messages.Stopped():
                            raise EngineDead("the engine ended while it started")
                elif exited:
                    code = handle.exited.result()
                    raise EngineDead(f"the engine ended while it started (exit code {code})")
                exited = handle.exited.done()
        finally:
            if receiving is not None:
                receiving.cancel()

    async def close(self, grace_s: float = 0.0) -> None:
        """Ends the engine. New requests are refused from now on; others may go on for `grace_s`.

        Whoever still waits then gets a delta with finish_reason `abort`, or EngineDead. Safe to
        call twice.
        """
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
            if not self._starting.cancelled():
                self._starting.exception()  # told to whoever waited for the start
        if self._handle is not None:
            if self._tasks and self._death is None:
                # The handle closes the link; the engine's last outputs must be read before.
                self._handle.client_end.send(messages.Shutdown(grace_s))
                await asyncio.wait(self._tasks[:1], timeout=grace_s + _STOP_S)
            await self._handle.close()
        self._die("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def wait_dead(self) -> str:
        """Returns why, when the engine has ended."""
        await self._died.wait()
        return self._death or ""

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._closing:
            raise EngineDead("the engine is being shut down")

    # What is served

    @property
    def info(self) -> EngineInfo:
        """Raises: EngineDead before the engine is ready."""
        if self._info is None:
            raise EngineDead(self._death or "the engine has not started yet")
        return self._info

    @property
    def model(self) -> TextModel:
        """Raises: EngineDead before the engine is ready."""
        if self._model is None:
            raise EngineDead(self._death or "the engine has not started yet")
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: InvalidRequest for a model that has none."""
        if self.model.tokenizer is None:
            raise InvalidRequest("prompt", f"{self.model.name} has no tokenizer; send token ids")
        return self.model.tokenizer

    @property
    def num_in_flight(self) -> int:
        """Choices that the engine has now."""
        return len(self._choices)

    @property
    def max_in_flight(self) -> int:
        return self.info.max_num_seqs + self.config.max_queue

    def stats(self) -> EngineStats:
        """The engine's counters, as it last told them."""
        return self._stats

    def generated_per_s(self) -> float:
        """Tokens, over the last seconds."""
        return self._generated.rate(time.monotonic(), self._stats.generated_tokens)

    async def state(self) -> EngineState:
        """A look into the engine, at most EngineView.MAX_AGE_S old. Raises: EngineDead."""
        await self.start()
        return await self._view.get()

    def _ask_state(self) -> None:
        self._check_alive()
        assert self._handle is not None
        self._handle.client_end.send(messages.Inspect())

    def health(self) -> None:
        """Raises: EngineDead, saying why, unless the engine is ready and running."""
        self._check_alive()
        if self._info is None:
            raise EngineDead("the engine is starting")

    # Text

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        await self.start()
        return await self._encode(text, add_special_tokens, None)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        await self.start()
        if token_ids:
            token_ids = check_token_ids("tokens", token_ids, self.info.vocab_size)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    async def chat_prompt(self, conversation: Messages, /, **template: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template, with further variables for it.

        Raises: InvalidRequest for malformed messages and for a model that has no template.
        """
        await self.start()
        chat_template = self.tokenizer.chat_template
        if chat_template is None:
            raise InvalidRequest(
                "messages",
                f"{self.model.name} has no chat template; "
                "complete a prompt instead (generate, /v1/completions)",
            )
        # In a thread: a template may loop for long.
        text = await asyncio.to_thread(chat_template.render, conversation, **template)
        # The template writes what the model expects around its text, BOS included.
        return await self._encode(text, False, self.info.max_request_tokens, "messages")

    async def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        max_tokens: int | None,
        field: str = "prompt",
    ) -> list[int]:
        encode = functools.partial(
            self.tokenizer.encode, text, add_special_tokens, max_tokens, field
        )
        return encode() if len(text) <= LONG_TEXT else await asyncio.to_thread(encode)

    # Requests

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        queue: Literal["refuse", "wait"] = "refuse",
        default_max_tokens: int | None = None,
        pooling: Pooling | None = None,
        until: Callable[[], Until] | None = None,
    ) -> RequestStream:
        """Checks a request and sends it. What the other verbs and the servers are made of.

        `pooling`: an embedding is wanted, see `embed`. `until`: makes what ends each choice.

        `queue`: what to do when as many choices are in flight as may be. `default_max_tokens`: for
        params without max_tokens, unless the context has less room; None: all the room there is.
        Raises: InvalidRequest, ContextExceeded, QueueFull, EngineDead.
        """
        arrival_s = time.monotonic()
        await self.start()
        if pooling is not None:
            self._check_pooling(pooling)
        return await self._send(
            await self._prepare(prompt, params or SamplingParams(), default_max_tokens),
            arrival_s,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            queue=queue,
            pooling=pooling,
            until=until,
        )

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Any,
    ) -> list[np.ndarray]:
        """One vector, f32[D], for each prompt: its hidden states after the model's last norm,
        pooled, and scaled to length 1 unless `normalize` is false.

        `options`: as `open` has them. Raises: InvalidRequest unless the engine's config has
        `embeddings`.
        """
        arrival_s = time.monotonic()
        await self.start()
        self._check_pooling(pooling)
        prepared = [await self._prepare(one, EMBEDDING) for one in list_prompts(prompts)]
        window = asyncio.Semaphore(self.max_in_flight)

        async def run(one: Prepared) -> np.ndarray:
            async with window:
                stream = await self._send(one, arrival_s, queue="wait", pooling=pooling, **options)
                await stream.result()
            return embedding_of(stream, normalize)

        return await _gather(run(one) for one in prepared)

    def _check_pooling(self, pooling: Any) -> None:
        if not self.config.embeddings:
            raise InvalidRequest(
                "input",
                "can't be embedded: the engine runs without --embeddings (Python: embeddings=True)",
            )
        if pooling not in get_args(Pooling):
            raise InvalidRequest("pooling", f"is {pooling!r}; allowed: last, mean")

    async def _prepare(
        self, prompt: Prompt, params: SamplingParams, default_max_tokens: int | None = None
    ) -> Prepared:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("prompt", "is empty; allowed: one token or more")
            most = self.info.max_request_tokens if params.truncate_prompt_tokens is None else None
            prompt = await self._encode(prompt, True, most)
        token_ids = check_token_ids("prompt", prompt, self.info.vocab_size)
        token_ids = truncate_prompt(token_ids, params, self.info.max_request_tokens)
        sampling = resolve_sampling(
            params, len(token_ids), self.model, self.info, default_max_tokens
        )
        check_search(params, len(sampling.stop_token_ids))
        compile_patterns(params.stop_regex)
        return token_ids, params, sampling

    async def _send(
        self,
        prepared: Prepared,
        arrival_s: float,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        queue: Literal["refuse", "wait", "pass"] = "refuse",
        pooling: Pooling | None = None,
        until: Callable[[], Until] | None = None,
    ) -> RequestStream:
        """`queue` "pass": goes in whatever is in flight, as a part of what is counted already."""
        token_ids, params, sampling = prepared
        width = max(params.n, params.best_of or 0)
        # A request with more choices than the limit may still run alone.
        while queue != "pass" and self._choices and len(self._choices) + width > self.max_in_flight:
            if queue == "refuse":
                self._observer.on_refused()
                raise QueueFull(self.max_in_flight)
            self._room.clear()
            await self._room.wait()
        # No await until it's sent: whoever is cancelled has either sent nothing or owns the stream.
        self._check_alive()
        assert self._handle is not None
        if request_id is None:
            request_id = secrets.token_hex(16)
        check_options(request_id, priority, cache_salt, self.config.policy)
        # With a space, which no id has that came over a wire.
        wire_ids = (
            [request_id] if params.n == 1 else [f"{request_id} #{i}" for i in range(params.n)]
        )
        if request_id in self._streams or not self._choices.keys().isdisjoint(wire_ids):
            raise InvalidRequest("request_id", f"{request_id!r} is in flight already")
        observer = NoObserver() if queue == "pass" else self._observer
        stream = RequestStream(request_id, token_ids, params, arrival_s, self._break_off, observer)
        echo = ""
        if params.echo:
            echo = self.tokenizer.decode(token_ids, params.skip_special_tokens)
        stops = StopAutomaton(params.stop) if params.stop else None
        patterns = compile_patterns(params.stop_regex)
        for index, wire_id in enumerate(wire_ids):
            detokenizer = self._detokenizer(token_ids, params, stops, patterns)
            choice = ChoiceState(
                stream,
                index,
                wire_id,
                detokenizer,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                echo=echo,
                until=until() if until is not None else None,
            )
            stream.choices.append(choice)
            self._choices[wire_id] = choice
        self._streams[request_id] = stream
        observer.on_request_start(len(token_ids), params)
        if search.is_search(params):
            options = {"priority": priority, "cache_salt": cache_salt, "until": until}
            stream.search = asyncio.ensure_future(self._search(stream, sampling, options))
        try:
            packed_ids = array("i", token_ids)
            for choice in stream.choices if stream.search is None else ():
                request = Request(
                    request_id=choice.wire_id,
                    token_ids=packed_ids,
                    sampling=for_choice(
                        sampling, choice_seed(params.seed, choice.index), choice.index
                    ),
                    priority=priority,
                    arrival_s=arrival_s,
                    cache_salt=cache_salt,
                    pooling=pooling,
                )
                self._handle.client_end.send(messages.Submit(request))
            await stream.accepted()
        except BaseException:
            self._break_off(stream)
            raise
        return stream

    def _detokenizer(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stops: StopAutomaton | None,
        patterns: Sequence[Any],
    ) -> Detokenizer | None:
        tokenizer = self.model.tokenizer
        return tokenizer and Detokenizer(
            tokenizer,
            prompt_token_ids,
            stops,
            params.min_tokens,
            patterns=patterns,
            keep_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    async def _search(
        self, stream: RequestStream, sampling: TokenSampling, options: Mapping[str, Any]
    ) -> None:
        """Finds the choices of a request for beam search or `best_of`, by requests of its own."""

        async def ask(
            token_ids: list[int], params: SamplingParams, sampling: TokenSampling
        ) -> RequestOutput:
            prepared = (token_ids, params, sampling)
            inner = await self._send(prepared, stream.arrival_s, queue="pass", **options)
            stream.accept()
            return await inner.result()

        try:
            found = await search.run(stream.prompt_token_ids, stream.params, sampling, ask)
        except Exception as error:  # nobody awaits the task: whoever reads the stream is told
            while isinstance(error, ExceptionGroup):  # of the beams of a step
                error = error.exceptions[0]
            stream.search = None
            self._fail(stream, error)
            return
        stream.search = None
        stream.num_unseen_tokens = found.num_unseen_tokens
        if found.prompt_logprobs is not None:
            stream.prompt_logprobs = found.prompt_logprobs
        now_s = time.monotonic()
        for choice, outputs in zip(stream.choices, found.choices, strict=True):
            self._accept(choice, outputs, now_s)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Completes one prompt or many, with the same params or one's own each; results in order.

        A prompt is a string or a list of token ids. Nothing runs if any of them can't be served.
        More prompts than may be in flight wait their turn. `on_finish` hears each result as it
        comes.
        """
        arrival_s = time.monotonic()
        await self.start()
        listed = list_prompts(prompts)
        prepared = [
            await self._prepare(prompt, each)
            for prompt, each in zip(listed, list_params(params, len(listed)), strict=True)
        ]
        most_choices = max((max(p.n, p.best_of or 0) for _, p, _ in prepared), default=1)
        window = asyncio.Semaphore(max(1, self.max_in_flight // most_choices))

        async def run(one: Prepared) -> RequestOutput:
            async with window:
                stream = await self._send(
                    one, arrival_s, priority=priority, cache_salt=cache_salt, queue="wait"
                )
                output = await stream.result()
            if on_finish is not None:
                on_finish(output)
            return output

        return await _gather(run(one) for one in prepared)

    async def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers one conversation or many, as `generate` completes prompts.

        `template`: further variables for the chat template.
        """
        prompts = [
            await self.chat_prompt(conversation, **(template or {}))
            for conversation in list_conversations(conversations)
        ]
        return await self.generate(
            prompts, params, on_finish=on_finish, priority=priority, cache_salt=cache_salt
        )

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Completes one prompt, delta by delta. Leaving the loop ends the request.

        `options`: as `open` has them.
        """
        async with await self.open(prompt, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def chat_stream(
        self,
        conversation: Messages,
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        """Answers one conversation, delta by delta, as `stream` completes a prompt."""
        prompt = await self.chat_prompt(conversation, **(template or {}))
        async with await self.open(prompt, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def abort(self, request_id: str) -> bool:
        """Ends a request: its reader gets what there is, with finish_reason `abort`.

        False: it isn't running.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        self._break_off(stream)
        return True

    async def flush_cache(self) -> None:
        """Drops every cached prefix that no running sequence uses."""
        await self.start()
        assert self._handle is not None
        self._handle.client_end.send(messages.FlushCache())

    # What comes back

    async def _pump(self, client_end: messages.ClientEnd) -> None:
        try:
            while True:
                match await client_end.receive():
                    case messages.Outputs() as message:
                        if message.stats is not None:
                            self._stats = message.stats
                        for request_id, queue_s in message.admitted:
                            choice = self._choices.get(request_id)
                            if choice is not None and choice.stream.queue_s is None:
                                choice.stream.queue_s = queue_s
                        now_s = time.monotonic()
                        self._generated.see(now_s, self._stats.generated_tokens)
                        for output in message.outputs:
                            choice = self._choices.get(output.request_id)
                            if choice is not None:  # else an Abort crossed this on the way
                                self._accept(choice, output, now_s)
                        # Receiving what is there already does not give up the loop.
                        await asyncio.sleep(0)
                    case messages.State() as message:
                        self._view.deliver(message.state)
                    case messages.Fatal() as message:
                        self._die(f"the engine died: {message.error}")
                        return
                    case messages.Stopped():
                        self._die("the engine was shut down")
                        return
        except Exception as error:  # nobody awaits the task: who waits for the engine is told
            log.exception("the link to the engine broke")
            self._die(f"the link to the engine broke: {error!r}")

    async def _watch(self, handle: EngineHandle, pump: asyncio.Task[None]) -> None:
        code = await asyncio.shield(handle.exited)
        await asyncio.wait([pump], timeout=_LAST_WORDS_S)
        self._die(f"the engine ended (exit code {code})")

    def _accept(self, choice: ChoiceState, output: TokenOutput, now_s: float) -> None:
        """Takes one step's tokens of a choice and hands its reader what is new."""
        stream = choice.stream
        if output.finish_reason == "error":
            reason = output.error or "the engine gave the request up"
            field = output.invalid_field
            self._fail(stream, InvalidRequest(field, reason) if field else RequestFailed(reason))
            return
        if output.prompt_logprobs is not None:
            stream.add_prompt_logprobs(output.prompt_logprobs, self._token_text)
            return
        if not output.token_ids and output.finish_reason is None:
            stream.accept()
            return
        try:
            token_ids, text = choice.take(output)
        except InvalidRequest as error:
            self._fail(stream, error)
            return
        if choice.finish_reason is not None and output.finish_reason is None:
            self._abort_in_engine([choice])  # a stop string: the engine doesn't know
        logprobs = None
        if output.logprobs is not None:
            named = stream.params.token_ids_logprob
            logprobs = chosen_logprobs(token_ids, output.logprobs, self._token_text, named)
            choice.logprobs = [*(choice.logprobs or []), *logprobs]
        if token_ids:
            if stream.first_token_s is None:
                stream.first_token_s = now_s - stream.arrival_s
                stream.observer.on_first_token(stream.first_token_s)
            last_s, choice.last_s = choice.last_s, now_s
            stream.observer.on_tokens(len(token_ids), None if last_s is None else now_s - last_s)
        if choice.finish_reason is not None:
            self._book_out(choice)
        stream.deliver(choice, text, token_ids, logprobs)

    def _token_text(self, token_id: int) -> str:
        tokenizer = self.model.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)

    def _book_out(self, choice: ChoiceState) -> None:
        """A choice has ended; with the last one, its request."""
        del self._choices[choice.wire_id]
        self._room.set()
        stream = choice.stream
        if stream.finished:
            del self._streams[stream.request_id]
            reason = stream.choices[0].finish_reason
            assert reason is not None
            stream.observer.on_request_finish(reason, stream.usage(), stream.times())
            if request_log.isEnabledFor(logging.INFO):
                request_log.info("%s", stream.log_line())

    def _break_off(self, stream: RequestStream) -> None:
        """Ends what still runs of a request, here and in the engine; its reader gets the rest."""
        running = stream.running()
        self._end_work(stream, running)
        for choice in running:
            text = choice.finish("abort")
            self._book_out(choice)
            stream.deliver(choice, text, [])

    def _fail(self, stream: RequestStream, error: Exception) -> None:
        """Ends a request: its reader gets the deltas that there are, then the error."""
        stream.error = error
        running = stream.running()
        self._end_work(stream, running)
        for choice in running:
            choice.finish("error")
            self._book_out(choice)
        stream.wake()

    def _end_work(self, stream: RequestStream, running: Sequence[ChoiceState]) -> None:
        if stream.search is not None:
            stream.search.cancel()  # which ends its own requests
        else:
            self._abort_in_engine(running)

    def _abort_in_engine(self, choices: Sequence[ChoiceState]) -> None:
        if choices and self._handle is not None and self._death is None:
            self._handle.client_end.send(messages.Abort([choice.wire_id for choice in choices]))

    def _die(self, reason: str) -> None:
        """The engine has ended: tells everybody who waits. The first reason stays."""
        if self._death is not None:
            return
        self._death = reason
        self._died.set()
        if not self._closing:
            log.error("%s", reason)
        for stream in list(self._streams.values()):
            self._fail(stream, EngineDead(reason))
        self._view.fail(EngineDead(reason))
        self._room.set()


def embedding_of(stream: RequestStream, normalize: bool) -> np.ndarray:
    """f32[D] of a finished request with `pooling`."""
    vector = np.frombuffer(stream.choices[0].embedding or b"", "<f4")
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector.astype(np.float64))), 1e-12)
    return vector.astype(np.float32)


def _start_error(message: messages.Fatal) -> Exception:
    kind = _USER_ERRORS.get(message.kind)
    if kind is None:
        return EngineDead(message.error)
    return kind(message.error.removeprefix(f"{message.kind}: "))


def _compare_vocabularies(model: TextModel, info: EngineInfo) -> None:
    # Some checkpoints do have tokens, of padding mostly, that their model never learned.
    if model.tokenizer is not None and model.tokenizer.vocab_size > info.vocab_size:
        log.warning(
            "%s: the tokenizer has %d tokens, the model %d; prompts with others are refused",
            model.name,
            model.tokenizer.vocab_size,
            info.vocab_size,
        )


async def _gather(coroutines: Iterable[Any]) -> list[Any]:
    """Results in order. The first error, or cancellation, cancels the rest and is raised then."""
    coroutines = list(coroutines)
    if len(coroutines) == 1:  # which a task of its own would only make later
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
