"""An engine that answers with a set text, and servers around it on free loopback ports."""

import asyncio
import contextlib
import dataclasses
import io
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import tokenizers as hf

from jaxserve import messages
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.client import Client, TextModel
from jaxserve.entry.proto import jaxserve_pb2_grpc
from jaxserve.entry.serve import Server
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.observation import EngineState
from jaxserve.types import (
    EngineInfo,
    EngineStats,
    ProgramCounts,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REPLY = "Hello, wörld! "


def byte_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token a byte, and <s> and </s>."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    backend = hf.Tokenizer(hf.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(
        backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=ChatTemplate(template, bos_token="<s>", eos_token="</s>"),
    )


@dataclasses.dataclass
class Running:
    request: Request
    position: int = 0
    scores: bool = False


class FakeEngine:
    """Both the link's client end and the engine behind it.

    Every sequence gets the tokens of `reply`, over and over, one each `step_s`; then </s>, if
    `ends`. `cached` prompt tokens are said to come from the cache.
    """

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo, reply: str = REPLY):
        self.reply_ids = tokenizer.encode(reply, False)
        self.eos = tokenizer.token_id("</s>")
        self.info = info
        self.ends = False
        self.step_s = 0.0
        self.cached = 0
        self.num_flushes = 0
        self.running: dict[str, Running] = {}
        self.requests: list[Request] = []
        self.admitted: list[tuple[str, float]] = []
        """To be told with the next outputs."""
        self.state = EngineState(
            now_s=1.0, sequences=[], steps=[], num_prefix_pages=0, prefix_nodes=[]
        )
        self.aborted: list[str] = []
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stats = EngineStats(pages_total=info.num_pages)
        self._out: asyncio.Queue[messages.FromEngine] = asyncio.Queue()
        self._out.put_nowait(messages.Progress("compile", "decode 8", 1, 2))
        self._out.put_nowait(messages.Progress("compile", "mixed 64", 2, 2))
        self._out.put_nowait(messages.Ready(info))
        self._work = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    # The handle and its client end

    @property
    def client_end(self) -> "FakeEngine":
        return self

    def send(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit(request):
                self.requests.append(request)
                scores = request.sampling.prompt_logprobs is not None
                self.running[request.request_id] = Running(request, scores=scores)
                self.admitted.append((request.request_id, 0.25))
                self._work.set()
            case messages.Abort(request_ids):
                for request_id in request_ids:
                    if self.running.pop(request_id, None) is not None:
                        self.aborted.append(request_id)
            case messages.FlushCache():
                self.num_flushes += 1
            case messages.Inspect():
                self._out.put_nowait(messages.State(self.state))
            case messages.Shutdown():
                self._task.cancel()
                self._out.put_nowait(messages.Stopped())

    async def receive(self) -> messages.FromEngine:
        return await self._out.get()

    async def close(self, grace_s: float = 0.0, *, at_once: bool = False) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self.exited.done():
            self.exited.set_result(0)

    def die(self) -> None:
        """Ends as an engine process does that is killed."""
        self._task.cancel()
        self.exited.set_result(-9)

    # The loop

    async def _run(self) -> None:
        while True:
            if not self.running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.step_s)
            running = list(self.running.values())
            outputs = [self._score(one) for one in running if one.scores]
            outputs += [self._step(one) for one in running]
            if outputs:
                self._count(outputs)
                admitted, self.admitted = self.admitted, []
                self._out.put_nowait(messages.Outputs(outputs, self._stats, admitted))

    def _score(self, one: Running) -> TokenOutput:
        sampling, one.scores = one.request.sampling, False
        count = len(one.request.token_ids) - 1 - sampling.prompt_logprobs_start
        top = list(range(sampling.prompt_logprobs or 0))
        named = [-3.0 - i for i in range(len(sampling.token_ids_logprob))]
        logprobs = [TokenLogprobs(-0.25, top, [-1.0 - i for i in top], named)] * count
        return TokenOutput(
            request_id=one.request.request_id, token_ids=[], prompt_logprobs=logprobs
        )

    def _step(self, one: Running) -> TokenOutput:
        sampling, request_id = one.request.sampling, one.request.request_id
        assert self.eos is not None
        token = self.reply_ids[one.position % len(self.reply_ids)]
        if self.ends and one.position == len(self.reply_ids):
            token = self.eos
        one.position += 1
        reason = None
        if token in sampling.stop_token_ids and one.position >= sampling.min_tokens:
            reason = "stop"
        elif one.position >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            del self.running[request_id]
        logprobs = None
        named = [-3.0 - i for i in range(len(sampling.token_ids_logprob))]
        if sampling.logprobs is not None or named:
            top = [token, *range(sampling.logprobs or 0)][: sampling.logprobs or 0]
            logprobs = [TokenLogprobs(-0.5, top, [-0.5 - i for i in range(len(top))], named)]
        embedding = None
        if one.request.pooling is not None:
            length = float(len(one.request.token_ids))
            pair = (length, 0.0) if one.request.pooling == "last" else (3.0, 4.0)
            embedding = struct.pack("<2f", *pair)
        return TokenOutput(
            embedding=embedding,
            request_id=request_id,
            token_ids=[token],
            finish_reason=reason,
            num_cached_tokens=self.cached,
            logprobs=logprobs,
        )

    def _count(self, outputs: list[TokenOutput]) -> None:
        self._stats = EngineStats(
            num_running=len(self.running),
            pages_used=len(self.running),
            pages_total=self.info.num_pages,
            num_steps=self._stats.num_steps + 1,
            prompt_tokens=sum(len(r.token_ids) for r in self.requests),
            cached_tokens=self.cached * len(self.requests),
            generated_tokens=self._stats.generated_tokens + len(outputs),
        )


def fake_info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "model": "tiny", "model_type": "llama", "vocab_size": 258, "num_parameters": 1_000_000,
        "weight_bytes": 4_000_000, "max_model_len": 256, "max_request_tokens": 256,
        "max_num_seqs": 4, "num_pages": 64, "page_size": 16, "kv_bytes": 1_000_000,
        "platform": "cpu", "device_kind": "cpu", "mesh": {"data": 1, "tensor": 1},
        "dtype": "float32", "attention": "reference", "num_compiled": 2, "compile_s": 0.1,
        "load_s": 0.1, "startup_s": 0.2,
        "programs": ProgramCounts(1, 1, 1, read_s=0.1, trace_s=0.3, compile_s=0.2),
    }  # fmt: skip
    return EngineInfo(**(fields | changes))


class Served:
    """A server that runs in the test's loop."""

    def __init__(self, server: Server, engines: list[FakeEngine], out: io.StringIO):
        self.server = server
        self.engines = engines
        self.out = out
        self.task = asyncio.ensure_future(server.run())

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def url(self) -> str:
        assert self.server.addresses is not None
        return f"http://127.0.0.1:{self.server.addresses.http_port}"

    @property
    def target(self) -> str:
        assert self.server.addresses is not None
        return f"127.0.0.1:{self.server.addresses.grpc_port}"

    async def idle(self) -> None:
        """Waits until the engine has nothing to do; fails after two seconds."""
        async with asyncio.timeout(2):
            while self.engine.running:
                await asyncio.sleep(0.005)


def fake_client_maker(
    engines: list[FakeEngine],
    set_up: Callable[[FakeEngine], None],
    reply: str = REPLY,
    template: str = TEMPLATE,
    defaults: SamplingParams | None = None,
    **info: Any,
) -> Any:
    tokenizer = byte_tokenizer(template)

    def make_client(config: EngineConfig, observer: Any, on_progress: Any) -> Client:
        async def start_engine(config: EngineConfig, process: Any) -> FakeEngine:
            engine = FakeEngine(tokenizer, fake_info(**info), reply)
            set_up(engine)
            engines.append(engine)
            return engine

        def load_model(name: str) -> TextModel:
            return TextModel("tiny", tokenizer, defaults or SamplingParams(), frozenset({257}))

        return Client(
            config,
            observer=observer,
            on_progress=on_progress,
            start_engine=start_engine,
            load_model=load_model,
        )

    return make_client


@contextlib.asynccontextmanager
async def serving(
    *,
    set_up: Callable[[FakeEngine], None] = lambda engine: None,
    reply: str = REPLY,
    template: str = TEMPLATE,
    max_queue: int = 8,
    embeddings: bool = False,
    defaults: SamplingParams | None = None,
    info: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server with both protocols over a FakeEngine, ready; stopped at the end."""
    engines: list[FakeEngine] = []
    out = io.StringIO()
    server = Server(
        EngineConfig(model="tiny", max_queue=max_queue, embeddings=embeddings),
        ServerConfig(**{"port": 0, "grpc_port": 0, "grace_s": 0.2, **settings}),
        make_client=fake_client_maker(engines, set_up, reply, template, defaults, **(info or {})),
        out=out,
    )
    served = Served(server, engines, out)
    ready = asyncio.ensure_future(server.ready.wait())
    try:
        async with asyncio.timeout(10):
            await asyncio.wait((ready, served.task), return_when=asyncio.FIRST_COMPLETED)
        if served.task.done():
            served.task.result()
        yield served
    finally:
        ready.cancel()
        if not served.task.done():
            server.stop()
            server.stop()
        async with asyncio.timeout(10):
            await served.task


@contextlib.asynccontextmanager
async def serving_http(**options: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """As `serving`, with a client of its HTTP side."""
    async with (
        serving(**options) as served,
        httpx.AsyncClient(base_url=served.url, timeout=10) as http,
    ):
        yield served, http


@contextlib.asynccontextmanager
async def serving_grpc(**options: Any) -> AsyncIterator[tuple[Served, Any]]:
    """As `serving`, with a stub of its gRPC side."""
    async with (
        serving(**options) as served,
        grpc.aio.insecure_channel(served.target) as channel,
    ):
        yield served, jaxserve_pb2_grpc.InferenceStub(channel)


async def finish(call: Any) -> None:
    """Reads a gRPC call to its end. Raises: AioRpcError if that is an error."""
    if not hasattr(call, "read"):
        await call
        return
    while await call.read() is not grpc.aio.EOF:
        pass
