"""A tiny model that chats, an engine and a server of it; a backend that answers from a script."""

import asyncio
import pathlib
import socket
import time
from collections.abc import Callable

import pytest
import select_cases
import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.front import Front
from jaxserve.entry.http import make_app
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.lang import Runtime, RuntimeEndpoint
from jaxserve.lang.backend import Backend, Generated, Scored
from jaxserve.metrics import Metrics
from jaxserve.types import SamplingParams, Usage

LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 64, "page_size": 8, "num_pages": 600}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> pathlib.Path:
    return select_cases.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def runtime(folder):
    with Runtime(model_path=str(folder), **LIMITS) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def endpoint(runtime):
    """The same engine's, over HTTP."""
    settings = ServerConfig(port=0)
    app = make_app(Front(runtime.client, "tiny"), Metrics(), settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = runtime.loop.submit(server.serve([listening]))
        while not server.started:
            time.sleep(0.01)
        with RuntimeEndpoint(url) as endpoint:
            yield endpoint
        server.should_exit = True
        serving.result(30)


class Scripted(Backend):
    """Answers each prompt with what `answer` says of its text: (text, stop string or None)."""

    def __init__(
        self, answer: Callable[[str], tuple[str, str | None]], template: str = select_cases.TEMPLATE
    ):
        super().__init__()
        self.answer = answer
        self.tokenizer = Tokenizer(
            select_cases.tokenizer(), eos_token="<|end|>", chat_template=ChatTemplate(template)
        )
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.joins = True

    @property
    def texts(self) -> list[str]:
        """Of the prompts so far."""
        return [self.tokenizer.decode(prompt, False) for prompt in self.prompts]

    @property
    def chat_template(self):
        return self.tokenizer.chat_template

    @property
    def joins_tokens(self):
        return self.joins

    async def encode(self, text, add_special_tokens):
        return self.tokenizer.encode(text, add_special_tokens)

    async def generate(self, token_ids, params, on_text):
        self.prompts.append(token_ids)
        self.params.append(params)
        text, stop = self.answer(self.tokenizer.decode(token_ids, False))
        # one token a character, as no tokenizer would have it
        ids = [self.tokenizer.encode(c, False)[0] for c in text]
        for character in text if on_text else ():
            on_text(character)
            await asyncio.sleep(0)
        return Generated(
            text=text,
            text_ids=None if stop else ids,
            finish_reason="stop",
            stop_reason=stop,
            usage=Usage(prompt_tokens=len(token_ids), completion_tokens=len(ids)),
            logprobs=None,
        )

    async def score(self, prompts, start, named):
        """Every token has the log-probability of minus its id."""
        self.prompts += prompts
        usage = Usage(prompt_tokens=0, completion_tokens=1)
        ids = [-float(token) for token in named]
        return [Scored([-float(t) for t in p[start + 1 :]], ids, usage) for p in prompts]

    def close(self):
        if self.loop.thread.is_alive():
            self.loop.stop()


@pytest.fixture
def scripted():
    """Makes scripted backends."""
    made: list[Scripted] = []

    def make(answer=lambda text: ("ok", None), **options) -> Scripted:
        made.append(Scripted(answer, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
