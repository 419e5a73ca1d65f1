"""What all metrics cost: a step's part of it in microseconds, and tokens/s with and without them.

Run: python -m bench.metrics_cost [MODEL] [--batch 256] [--tokens 128] [--repeats 12]
Decoding `--batch` sequences in pairs of passes, metrics on (steps timed, counters told 20 times a
second, requests observed, scraped each second) and off, the first of a pair in turn, so that a
drift of the machine cancels. The engine runs in this process, where the entry's work takes the
engine's time too; as a server's does not, whose engine is a process of its own.
"""

import argparse
import asyncio
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec

from bench import engines, record
from bench.trace import SplitMix64
from jaxserve import AsyncLLM, SamplingParams
from jaxserve.engine import loop
from jaxserve.engine.recorder import Recorder
from jaxserve.entry.request_stream import NoObserver
from jaxserve.messages import Outputs
from jaxserve.metrics import Metrics
from jaxserve.scheduler.sequence import Batch
from jaxserve.types import BucketStats, EngineInfo, EngineStats

SCRAPE_S = 1.0
INPUT_TOKENS = 32


def microseconds(function: Callable[[], Any], repeats: int = 2000) -> float:
    """The median over five rounds of a call's mean time."""
    means: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        means.append((time.perf_counter() - start) / repeats * 1e6)
    return round(statistics.median(means), 2)


def parts(info: EngineInfo, batch: int, repeats: int = 2000) -> dict[str, float]:
    """What each part takes, in microseconds, without an engine."""
    recorder, step = Recorder(), Batch([], 0, batch, [], [])
    buckets = tuple(BucketStats("decode", 2**i, 1000, 1000 * i) for i in range(16))
    stats = EngineStats(
        step_seconds=recorder.step_seconds, buckets=buckets, prompt_tokens=10**6, num_steps=10**5
    )
    told = msgspec.msgpack.encode(Outputs([], stats))
    read = msgspec.msgpack.Decoder(Outputs).decode
    metrics = Metrics()
    metrics.serve("model", lambda: stats, info)

    def tell() -> None:
        steps = {kind: seconds.copy() for kind, seconds in recorder.step_seconds.items()}
        new = msgspec.structs.replace(
            stats,
            step_seconds=steps,
            host_gap_seconds=recorder.host_gap_seconds.copy(),
            step_tokens=recorder.step_tokens.copy(),
        )
        msgspec.msgpack.encode(Outputs([], new))

    def observe() -> None:
        for _ in range(batch):
            metrics.on_tokens(1, 0.01)

    now_s = time.monotonic()
    return {
        "engine, each step: timing it": microseconds(
            lambda: recorder.record(step, now_s, now_s), repeats
        ),
        f"engine, each {loop.STATS_INTERVAL_S:g} s: telling the counters": microseconds(
            tell, repeats
        ),
        f"entry, each {loop.STATS_INTERVAL_S:g} s: reading the counters": microseconds(
            lambda: read(told), repeats
        ),
        f"entry, each step: observing {batch} tokens": microseconds(observe, max(1, repeats // 20)),
        "entry, each scrape": microseconds(metrics.render, max(1, repeats // 50)),
    }


class Switch(NoObserver):
    """An observer, and what the engine itself does for metrics, that can be turned off: timing its
    steps, and telling its counters before it has nothing left to do.

    Works on the classes of this process, from `with` on until its end.
    """

    def __init__(self):
        self.metrics = Metrics()
        self.on = True
        self._observed = [name for name in vars(NoObserver) if name.startswith("on_")]
        self._record, self._step = Recorder.record, loop.Engine.step

    def __enter__(self) -> Self:
        def step(engine: loop.Engine) -> None:
            if not self.on:
                engine._stats_due_s = math.inf
            elif engine._stats_due_s == math.inf:
                engine._stats_due_s = 0.0
            self._step(engine)

        loop.Engine.step = step  # pyright: ignore
        self.turn(True)
        return self

    def __exit__(self, *exception: object) -> None:
        Recorder.record, loop.Engine.step = self._record, self._step

    def turn(self, on: bool) -> None:
        self.on = on
        observer = self.metrics if on else NoObserver()
        for name in self._observed:  # found here, so that both ways are one call
            setattr(self, name, getattr(observer, name))
        Recorder.record = self._record if on else _nothing  # pyright: ignore


def _nothing(*arguments: Any) -> None:
    pass


async def scrape(switch: Switch) -> None:
    """For ever, while metrics are on."""
    while True:
        await asyncio.sleep(SCRAPE_S)
        if switch.on:
            switch.metrics.render()


async def generate_s(llm: AsyncLLM, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all have their tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    gc.collect()
    start = time.perf_counter()
    await llm.generate(prompts, params)
    return time.perf_counter() - start


def prompts_of(random: SplitMix64, batch: int, vocab_size: int) -> Iterator[list[list[int]]]:
    """Ever new ones, that no cache has."""
    while True:
        yield [random.tokens(INPUT_TOKENS, vocab_size) for _ in range(batch)]


async def measure(arguments: argparse.Namespace) -> tuple[EngineInfo, dict[str, Any]]:
    config = engines.engine_config(arguments)
    batch, tokens = arguments.batch, arguments.tokens
    rates: dict[bool, list[float]] = {True: [], False: []}
    with Switch() as switch:
        async with AsyncLLM(config, process="thread", observer=switch) as llm:
            info = llm.info
            switch.metrics.serve(info.model, llm.stats, info)
            prompts = prompts_of(SplitMix64(0), batch, info.vocab_size)
            await generate_s(llm, next(prompts), tokens)  # warms up
            scraping = asyncio.ensure_future(scrape(switch))
            for i in range(arguments.repeats):
                for on in (True, False) if i % 2 else (False, True):
                    switch.turn(on)
                    seconds = await generate_s(llm, next(prompts), tokens)
                    rates[on].append(batch * tokens / seconds)
            scraping.cancel()
    costs = [1 - on / off for on, off in zip(rates[True], rates[False], strict=True)]
    return info, {
        "tokens_per_s on": [round(rate, 1) for rate in rates[True]],
        "tokens_per_s off": [round(rate, 1) for rate in rates[False]],
        "cost, by pair": [round(cost, 5) for cost in costs],
        "cost, median": round(statistics.median(costs), 5),
        "cost, mean": round(statistics.mean(costs), 5),
        "cost, standard error": round(statistics.stdev(costs) / len(costs) ** 0.5, 5),
        "parts_us": parts(info, batch),
    }


def main() -> None:
    parser = engines.engine_parser(__doc__, prefix_cache=False)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=12, help="pairs of passes")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats: at least 2 pairs, for the spread between them")
    info, figures = asyncio.run(measure(arguments))
    figures = {"batch": arguments.batch, "tokens": arguments.tokens, **figures}
    record.store("metrics_cost", engines.device_name(info), figures)


if __name__ == "__main__":
    main()
