"""What programs of the prompt language compute with and without the prefix cache, and how fast many
of them run side by side.

Run: python -m bench.lang [MODEL] [--parts tokens,batch] [--programs 200] [--answer-len 16]

- tokens: each program of `examples/`, as its command runs it: tokens that went through the model.
- batch: short programs by `run_batch`, against their prompts as one batch of `LLM.generate`'s kind,
  and sent one at a time; prefix cache on, and empty at each start.
"""

import argparse
import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import engines, record
from jaxserve import Runtime, SamplingParams, function, gen
from jaxserve.types import EngineStats

EXAMPLES = ("json_output", "few_shot", "tree_of_thought", "tool_agent", "chat")
PARTS = ("tokens", "batch")


@function
def short(s, number):
    s += f"Question: what comes after {number}, and what before it?\nAnswer:"
    s += gen("answer")


def prompt_of(number: int) -> str:
    """What `short` asks."""
    return f"Question: what comes after {number}, and what before it?\nAnswer:"


def settled(runtime: Runtime) -> EngineStats:
    """Its counters, once it has nothing left to do.

    A stop string is found where tokens become text: the engine goes on until it is told, and the
    program's answer does not wait for that.
    """
    client, called_s = runtime.client, time.monotonic()
    while (state := runtime.loop.run(client.state())).now_s < called_s or state.sequences:
        time.sleep(0.02)
    return runtime.stats()


def count_tokens(runtime: Runtime, name: str) -> dict[str, int]:
    """Of an example, run with its items from an empty cache."""
    module = importlib.import_module(f"examples.{name}")
    runtime.flush_cache()
    before = settled(runtime)
    getattr(module, name).run_batch(module.ITEMS, backend=runtime, temperature=0)
    after = settled(runtime)
    fields = ("prompt_tokens", "computed_tokens", "generated_tokens", "num_steps")
    return {field: getattr(after, field) - getattr(before, field) for field in fields}


def compare_tokens(counts: dict[str, dict[str, dict[str, int]]]) -> dict[str, Any]:
    """`counts`: by example, then with and without the cache."""
    figures: dict[str, Any] = {}
    for name, found in counts.items():
        on, off = (found[cache]["computed_tokens"] for cache in ("cache on", "cache off"))
        figures[name] = {**found, "times_fewer": round(off / on, 2)}
    return figures


def batch_part(runtime: Runtime, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of each way, median of the repeats, which take turns."""
    numbers = range(arguments.programs)
    fields = {"max_tokens": arguments.answer_len, "temperature": 0, "ignore_eos": True}
    params = SamplingParams(**fields)
    client, loop = runtime.client, runtime.loop

    def programs() -> None:
        short.run_batch([{"number": number} for number in numbers], backend=runtime, **fields)

    def plain() -> None:
        loop.run(client.generate([prompt_of(number) for number in numbers], params))

    async def each() -> None:
        for number in numbers:
            await client.generate(prompt_of(number), params)

    ways: dict[str, Callable[[], None]] = {
        "run_batch": programs,
        "plain batch": plain,
        "one at a time": lambda: loop.run(each()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, int] = {}
    plain()  # warms up
    for _ in range(arguments.repeats):
        for name, run in ways.items():
            runtime.flush_cache()
            before, start_s = runtime.stats().num_steps, time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start_s)
            steps[name] = runtime.stats().num_steps - before
    num_tokens = len(numbers) * arguments.answer_len
    figures: dict[str, Any] = {
        name: {
            "tokens_per_s": round(num_tokens / statistics.median(found), 1),
            "steps": steps[name],
            **record.spread(found),
        }
        for name, found in seconds.items()
    }
    for name in ("plain batch", "one at a time"):
        ratio = figures["run_batch"]["tokens_per_s"] / figures[name]["tokens_per_s"]
        figures[f"run_batch over {name}"] = round(ratio, 3)
    return figures


def main() -> None:
    parser = engines.engine_parser(__doc__)
    engines.add_process(parser)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--answer-len", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    parts, names = arguments.parts.split(","), arguments.examples.split(",")
    for given, known in ((parts, PARTS), (names, EXAMPLES)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(unknown)}: known are {', '.join(known)}")
    if arguments.prefix_cache is not None:
        parser.error("prefix_cache is what this bench turns on and off itself")
    config = engines.engine_config(arguments)
    figures: dict[str, Any] = {}
    counts: dict[str, dict[str, dict[str, int]]] = {name: {} for name in names}
    device = ""
    for cache, is_on in (("cache on", True), ("cache off", False)):
        if not is_on and "tokens" not in parts:
            break
        chosen = dataclasses.replace(config, prefix_cache=is_on)
        with Runtime(chosen, process=arguments.process) as runtime:
            device = engines.device_name(runtime.info)
            if is_on and "batch" in parts:
                figures["batch"] = batch_part(runtime, arguments)
            for name in names if "tokens" in parts else ():
                counts[name][cache] = count_tokens(runtime, name)
    if "tokens" in parts:
        figures["tokens"] = compare_tokens(counts)
    record.store("lang", device, figures)


if __name__ == "__main__":
    main()
