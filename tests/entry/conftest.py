"""Tokenizers made on the fly, and an engine that answers from a script over the in-process link."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from jaxserve import messages
from jaxserve.entry import gguf_tokenizer
from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.text_model import TextModel
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.types import EngineInfo, EngineStats, Request, SamplingParams, TokenOutput

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Paris is the capital of France; 1234 people said so in 2019. END STOP stop",
    "def add(a, b):\n    return a + b\n\n\tif x == y:\r\n  pass",
    "Grüße aus Köln, привет, 你好世界, こんにちは, 🤗🎉👩‍👩‍👧 naïve café",
]
CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_byte_level() -> Tokenizer:
    """Byte-level BPE with 3 special tokens: <|text|> (end of text), <|start|>, <|end|>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|text|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return Tokenizer(
        backend,
        eos_token="<|end|>",
        eos_token_ids=[backend.token_to_id("<|text|>")],
        chat_template=ChatTemplate(CHAT, eos_token="<|end|>"),
    )


def sentencepiece_parts() -> dict:
    """What a GGUF file says of a small SentencePiece vocabulary with byte fallback."""
    words = [
        "▁",
        "▁t",
        "▁th",
        "▁the",
        "he",
        "in",
        "▁a",
        "er",
        "▁c",
        "▁ca",
        "▁cat",
        "▁s",
        "on",
        "▁▁",
    ]
    letters = [chr(c) for c in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    pieces = list(dict.fromkeys(pieces))
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    return {
        "model": "llama",
        "tokens": pieces,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return make_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return gguf_tokenizer.build(sentencepiece_parts())


def make_info(**fields) -> EngineInfo:
    values = dict(
        model="tiny", model_type="llama", vocab_size=512, num_parameters=1, weight_bytes=4,
        max_model_len=256, max_request_tokens=256, max_num_seqs=4, num_pages=64, page_size=16,
        kv_bytes=1, platform="cpu", device_kind="cpu", mesh={"tensor": 1}, dtype="float32",
        attention="reference", num_compiled=0, compile_s=0.0, load_s=0.0, startup_s=0.0,
    )  # fmt: skip
    return EngineInfo(**(values | fields))


@dataclasses.dataclass
class FakeEngine:
    """An engine in a thread, which sends what `script(request)` yields: one TokenOutput a step.

    With `hold`, each step waits for `allow`. `start_engine` and `load_model` go to a Client.
    """

    tokenizer: Tokenizer | None = None
    script: Callable[[Request], Iterable[TokenOutput]] | None = None
    info: EngineInfo = dataclasses.field(default_factory=make_info)
    hold: bool = False
    start_messages: Sequence[messages.FromEngine] | None = None
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    chunk: int = 1
    """Tokens that a step brings."""

    def __post_init__(self):
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.shutdowns: list[float] = []
        self.threads: list[threading.Thread] = []
        self.allowed = threading.Semaphore(0)
        self.changed = threading.Event()
        self.answer = "Hello there."
        self.client_end: messages.ClientEnd | None = None

    def load_model(self, name: str) -> TextModel:
        eos = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        return TextModel("tiny", self.tokenizer, self.defaults, eos)

    def allow(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.allowed.release()

    async def start_engine(self, config, process) -> "FakeHandle":
        loop = asyncio.get_running_loop()
        self.link = messages.QueueEngineEnd()
        self.client_end = self.link.connect()
        exited = loop.create_future()

        def end(code: int) -> None:
            if not exited.done():
                exited.set_result(code)

        def body() -> None:
            code = self.run()
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, code)

        thread = threading.Thread(target=body, name="fake-engine", daemon=True)
        self.threads.append(thread)
        thread.start()
        return FakeHandle(self.client_end, exited)

    def run(self) -> int:
        for message in self.start_messages or [messages.Ready(self.info)]:
            self.link.send(message)
            if isinstance(message, messages.Fatal):
                return 1
        running: dict[str, Iterator[TokenOutput]] = {}
        stop_at_s: float | None = None
        while True:
            if stop_at_s is not None and (not running or time.monotonic() >= stop_at_s):
                self.link.send(messages.Stopped())
                return 0
            for message in self.link.receive(0.002 if running else 0.02):
                match message:
                    case messages.Submit(request):
                        self.requests.append(request)
                        running[request.request_id] = iter((self.script or self.say)(request))
                    case messages.Abort(ids):
                        self.aborted += ids
                        for request_id in ids:
                            running.pop(request_id, None)
                    case messages.Shutdown(grace_s):
                        self.shutdowns.append(grace_s)
                        stop_at_s = time.monotonic() + grace_s
                self.changed.set()
            if not running or (self.hold and not self.allowed.acquire(blocking=False)):
                continue
            outputs = []
            for request_id, steps in list(running.items()):
                output = next(steps, None)
                if output is None:
                    del running[request_id]
                elif isinstance(output, messages.Fatal):
                    self.link.send(output)
                    return 1
                elif output == "die":
                    return 3
                else:
                    outputs.append(output)
                    if output.finish_reason is not None:
                        del running[request_id]
            stats = EngineStats(num_running=len(running), num_steps=1)
            self.link.send(messages.Outputs(outputs, stats))

    def say(self, request: Request) -> Iterable[TokenOutput]:
        """`answer`, then an end-of-text token, or as much as max_tokens allows."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(self.answer, False)
        sampling = request.sampling
        ends = [t for t in sampling.stop_token_ids if t in self.tokenizer.eos_token_ids]
        yield from steps_of(request, [*ids, *ends[:1]], self.chunk)


def steps_of(request: Request, ids: Sequence[int], chunk: int = 1) -> Iterable[TokenOutput]:
    """Outputs that bring `ids`, up to a stop token or max_tokens, `chunk` at a time."""
    sampling, kept, reason = request.sampling, [], "length"
    for token_id in ids[: sampling.max_tokens]:
        kept.append(token_id)
        if token_id in sampling.stop_token_ids and len(kept) >= sampling.min_tokens:
            reason = "stop"
            break
    for start in range(0, len(kept), chunk):
        last = start + chunk >= len(kept)
        yield TokenOutput(
            request_id=request.request_id,
            token_ids=kept[start : start + chunk],
            finish_reason=reason if last else None,
        )


class FakeHandle:
    def __init__(self, client_end: messages.ClientEnd, exited: asyncio.Future[int]):
        self.client_end = client_end
        self.exited = exited

    async def close(self, grace_s: float = 0.0, *, at_once: bool = False) -> None:
        if not self.exited.done():
            self.client_end.send(messages.Shutdown(grace_s))
            await asyncio.wait([self.exited], timeout=5)
        self.client_end.close()


@pytest.fixture
def fake_engine():
    """Makes fake engines: `fake_engine(tokenizer, **fields)`. Their threads must have ended."""
    engines: list[FakeEngine] = []

    def make(tokenizer: Tokenizer | None = None, **fields) -> FakeEngine:
        engines.append(FakeEngine(tokenizer, **fields))
        return engines[-1]

    make.steps_of = steps_of
    make.info = make_info
    yield make
    for engine in engines:
        for thread in engine.threads:
            thread.join(timeout=2)
            assert not thread.is_alive(), "a fake engine still runs: its client was not closed"
