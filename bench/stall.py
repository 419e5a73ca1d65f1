"""How long a long prompt holds up the streams that run beside it: gaps between their tokens, with
the prompt computed in chunks and whole.

Run: python -m bench.stall [MODEL] [--long-len 2048] [--long-prompts 4] [--streams 8]
     [--max-batched-tokens 256]
"Chunked" steps take `--max-batched-tokens`; "whole" ones the long prompt and a token of each
stream. Long prompts come one after another. Chunked prefill: arXiv:2308.16369, arXiv:2403.02310.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import time
from typing import Any

from bench import engines, record
from bench.trace import make_prompts
from jaxserve import AsyncLLM, SamplingParams
from jaxserve.config import EngineConfig

STREAM_LEN = 32
"""Prompt tokens of a stream."""
LONG_OUTPUT = 4
"""Tokens generated after each long prompt: by then each stream had a token past the prompt."""
QUIET_TOKENS = 16
"""A stream's tokens before the first long prompt."""


class Streams:
    """Streams that run until they are stopped; one that fills its context begins anew."""

    def __init__(self, llm: AsyncLLM, count: int):
        self.gaps_s: list[float] = []
        """Between tokens of one stream, since last taken."""
        self.counts = [0] * count
        prompts = make_prompts(count, STREAM_LEN, 0, llm.info.vocab_size)
        self._tasks = [
            asyncio.create_task(self._run(llm, i, prompt)) for i, prompt in enumerate(prompts)
        ]

    async def _run(self, llm: AsyncLLM, index: int, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True)
        while True:
            last_s: float | None = None
            async with await llm.open(prompt, params) as stream:
                async for _ in stream:
                    now_s = time.perf_counter()
                    if last_s is not None:
                        self.gaps_s.append(now_s - last_s)
                    last_s = now_s
                    self.counts[index] += 1

    def take(self) -> list[float]:
        taken, self.gaps_s = self.gaps_s, []
        return taken

    async def wait(self, num_tokens: int) -> None:
        """Until each has that many tokens more. Raises what ended a stream."""
        target = [count + num_tokens for count in self.counts]
        while any(count < enough for count, enough in zip(self.counts, target, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def summary(gaps_s: list[float]) -> dict[str, float]:
    return {**record.percentiles(gaps_s), "longest_ms": round(max(gaps_s) * 1e3, 2)}


async def measure(config: EngineConfig, arguments: argparse.Namespace) -> tuple[dict, str]:
    """Figures of one engine, and its device's name."""
    params = SamplingParams(max_tokens=LONG_OUTPUT, temperature=0, ignore_eos=True)
    async with AsyncLLM(config, process=arguments.process) as llm:
        vocab = llm.info.vocab_size
        # one more than is counted: the first of each kind warms up
        first, *prompts = make_prompts(arguments.long_prompts + 1, arguments.long_len, 1, vocab)
        streams = Streams(llm, arguments.streams)
        try:
            await (await llm.open(first, params)).result()
            await streams.wait(1)
            streams.take()
            await streams.wait(QUIET_TOKENS)
            quiet = streams.take()
            ttft_s = []
            for prompt in prompts:
                stream = await llm.open(prompt, params)
                await stream.result()
                assert stream.first_token_s is not None
                ttft_s.append(stream.first_token_s)
                await streams.wait(1)
            disturbed = streams.take()
        finally:
            await streams.stop()
        device = engines.device_name(llm.info)
    return {
        "max_batched_tokens": config.max_batched_tokens,
        "gaps without long prompts": summary(quiet),
        "gaps": summary(disturbed),
        "time_to_first_token of long prompts": record.percentiles(ttft_s),
    }, device


async def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    chunked = engines.engine_config(arguments)
    whole = dataclasses.replace(chunked, max_batched_tokens=arguments.long_len + arguments.streams)
    figures: dict[str, Any] = {
        "streams": arguments.streams,
        "long_prompts": arguments.long_prompts,
        "long_len": arguments.long_len,
    }
    device = ""
    for name, config in (("chunked", chunked), ("whole", whole)):
        figures[name], device = await measure(config, arguments)
    figures["longest gap, chunked over whole"] = round(
        figures["chunked"]["gaps"]["longest_ms"] / figures["whole"]["gaps"]["longest_ms"], 3
    )
    return figures, device


def main() -> None:
    parser = engines.engine_parser(
        __doc__, max_batched_tokens=256, max_num_seqs=16, prefix_cache=False
    )
    engines.add_process(parser)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long-len", type=int, default=2048)
    parser.add_argument("--long-prompts", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.long_len <= arguments.max_batched_tokens:
        parser.error("--long-len must be over --max-batched-tokens, or nothing is chunked")
    if arguments.streams >= arguments.max_num_seqs:
        parser.error("--streams must be under --max-num-seqs, or the long prompts wait for them")
    figures, device = asyncio.run(run(arguments))
    record.store("stall", device, figures)


if __name__ == "__main__":
    main()
