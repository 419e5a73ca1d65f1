"""Engines small enough to start in a test, driven step by step without threads or processes."""

import collections
import dataclasses
import json
import pathlib

import safetensors.numpy
import tiny_models
from tiny_models import TINY

from jaxserve import messages
from jaxserve.config import EngineConfig, MeshConfig
from jaxserve.engine.loop import Engine
from jaxserve.engine.start import start
from jaxserve.types import EngineInfo, Request, TokenOutput, TokenSampling


class ListLink:
    """A link whose other end is the test itself."""

    def __init__(self):
        self.inbox: list[messages.ToEngine] = []
        self.sent: list[messages.FromEngine] = []

    def receive(self, timeout_s: float | None) -> list[messages.ToEngine]:
        taken, self.inbox = self.inbox, []
        return taken

    def send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Result:
    token_ids: list[int]
    finish_reason: str | None
    cached: int
    logprobs: list
    prompt_logprobs: list
    error: str | None = None
    invalid_field: str | None = None


class Driver:
    """An engine and its link: submit requests, step, look at what came back."""

    def __init__(self, engine: Engine, link: ListLink):
        self.engine, self.link = engine, link
        self.scheduler, self.runner = engine._scheduler, engine._runner
        self.info: EngineInfo = next(m.info for m in link.sent if isinstance(m, messages.Ready))
        link.sent.clear()
        self._count = 0

    def submit(self, token_ids: list[int], *, request_id: str | None = None, **sampling) -> str:
        self._count += 1
        request_id = request_id or f"r{self._count}"
        options = {"max_tokens": 12, "temperature": 0.0, **sampling}
        salt = options.pop("cache_salt", "")
        self.engine._handle(
            messages.Submit(
                Request(
                    request_id=request_id,
                    token_ids=token_ids,
                    sampling=TokenSampling(**options),
                    cache_salt=salt,
                )
            )
        )
        return request_id

    def step(self, check: bool = True) -> None:
        self.engine.step()
        if check:
            self.scheduler.check()

    def finish(self, check: bool = True) -> dict[str, Result]:
        """Steps until nothing is left to do; what each request got since the last call."""
        while self.scheduler.has_work or self.engine._pending is not None:
            self.step(check)
        self.step(check)
        return self.results()

    def results(self) -> dict[str, Result]:
        found: dict[str, Result] = collections.defaultdict(lambda: Result([], None, 0, [], []))
        for output in self.outputs():
            result = found[output.request_id]
            assert result.finish_reason is None, f"output after the end: {output}"
            result.token_ids += output.token_ids
            result.finish_reason = output.finish_reason
            result.cached = output.num_cached_tokens
            result.logprobs += output.logprobs or []
            assert not (output.prompt_logprobs and result.token_ids), "the prompt's come first"
            result.prompt_logprobs += output.prompt_logprobs or []
            result.error, result.invalid_field = output.error, output.invalid_field
        return dict(found)

    def outputs(self) -> list[TokenOutput]:
        sent, self.link.sent = self.link.sent, []
        return [o for m in sent if isinstance(m, messages.Outputs) for o in m.outputs]

    def generate(self, prompts: list[list[int]], **sampling) -> list[list[int]]:
        """Tokens of all prompts, submitted at once."""
        ids = [self.submit(prompt, **sampling) for prompt in prompts]
        results = self.finish()
        assert all(results[id].error is None for id in ids), results
        return [results[id].token_ids for id in ids]

    def forget(self) -> None:
        """Empties the prefix cache, so that the next test starts cold."""
        self.scheduler.flush_cache()


def write_model(folder: pathlib.Path, *, weights: bool = True, **changes) -> pathlib.Path:
    """A Hugging Face folder of the tiny model without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**TINY, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        safetensors.numpy.save_file(
            tiny_models.tensors(config), folder / "model.safetensors", metadata={"format": "pt"}
        )
    return folder


def make(folder: pathlib.Path, *, tensor: int = 1, config_changes: dict | None = None, **fields):
    """A Driver over the tiny model; `fields` are EngineConfig's."""
    link = ListLink()
    settings = {
        "model": str(write_model(folder, **(config_changes or {}))),
        "max_num_seqs": 4,
        "max_batched_tokens": 32,
        "page_size": 8,
        "num_pages": 200,
        "mesh": MeshConfig(tensor=tensor),
        **fields,
    }
    return Driver(start(EngineConfig(**settings), link), link)
