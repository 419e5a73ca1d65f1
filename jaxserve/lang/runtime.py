"""Programs on an engine of this process. Imports jax only where the engine runs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.llm import AsyncLLM
from jaxserve.entry.loop_thread import end_loop
from jaxserve.lang.backend import DEFAULT_MAX_TOKENS, Backend, Generated, Scored, text_ids
from jaxserve.types import EngineInfo, EngineStats, RequestFailed, SamplingParams


class Runtime(Backend):
    """An engine of one model for programs; the steps of all that run batch together.

    `close` ends it, and so do leaving a `with` block, losing the last reference, and the end of the
    program.
    """

    def __init__(self, model_path: str | EngineConfig | None = None, **settings: Any):
        """Loads and compiles; returns when the engine is ready.

        `model_path`, `settings`: as `LLM` has them (`process="spawn"`, fields of EngineConfig).
        Raises: ConfigError, CheckpointError, UnsupportedModel, EngineDead.
        """
        client = AsyncLLM(model_path, **settings)
        super().__init__()
        self.client = client
        """The engine's, for use in `loop`."""
        self._finalizer = weakref.finalize(self, end_loop, self.loop, client.close)
        try:
            self.loop.run(client.start())
        except BaseException:
            self._finalizer()
            raise

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    def stats(self) -> EngineStats:
        """The engine's counters, as it last told them."""
        return self.client.stats()

    def flush_cache(self) -> None:
        """Drops every cached prefix that no running sequence uses."""
        self.loop.run(self.client.flush_cache())

    def close(self) -> None:
        self._finalizer()

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.client.tokenizer.chat_template

    @property
    def joins_tokens(self) -> bool:
        return not self.client.tokenizer.strips_first_space

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self.client.tokenize(text, add_special_tokens)

    async def generate(
        self, token_ids: list[int], params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> Generated:
        stream = await self.client.open(
            token_ids, params, queue="wait", default_max_tokens=DEFAULT_MAX_TOKENS
        )
        if on_text is None:
            await stream.result()
        else:
            async with stream:
                async for delta in stream:
                    on_text(delta.text)
        choice = stream.choices[0].choice()
        if choice.finish_reason == "abort":
            raise RequestFailed("the request was aborted")
        ends = self.client.model.eos_token_ids.union(params.stop_token_ids)
        return Generated(
            text=choice.text,
            text_ids=text_ids(choice.token_ids, choice.finish_reason, choice.stop_reason, ends),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            usage=stream.usage(),
            logprobs=choice.logprobs,
        )

    async def score(
        self, prompts: list[list[int]], start: int, named: Sequence[int]
    ) -> list[Scored]:
        is_past_start = any(len(prompt) > start + 1 for prompt in prompts)
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            token_ids_logprob=tuple(named),
            prompt_logprobs=0 if is_past_start else None,
            prompt_logprobs_start=start if is_past_start else 0,
        )
        scored: list[Scored] = []
        for output in await self.client.generate(prompts, params):
            tokens = (output.prompt_logprobs or [])[start + 1 :]
            assert output.choices[0].logprobs is not None
            scored.append(
                Scored(
                    [token.logprob for token in tokens if token is not None],
                    [logprob for *_, logprob in output.choices[0].logprobs[0].named],
                    output.usage,
                )
            )
        return scored
