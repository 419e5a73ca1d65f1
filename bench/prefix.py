"""What the prefix cache saves: conversations and few-shot questions, with the cache on and off.

Run: python -m bench.prefix [MODEL] [--conversations 16] [--turns 4] [--tasks 4] [--questions 16]
All conversations take a turn at once, then the next; all questions come at once. `max_hit_rate` is
what an endless cache of the prompts alone would have: answers in the history come on top of it.
"""

import argparse
import dataclasses
import time
from typing import Any

from bench import engines, record
from bench.trace import make_prompts
from bench.workloads import few_shot, multi_turn, shareable_tokens
from jaxserve import LLM, SamplingParams
from jaxserve.types import EngineStats


def run_multi_turn(llm: LLM, arguments: argparse.Namespace) -> list[list[int]]:
    """Returns the prompts in the order they were sent."""
    conversations = multi_turn(
        arguments.conversations,
        arguments.turns,
        arguments.system_len,
        arguments.message_len,
        llm.info.vocab_size,
    )
    params = SamplingParams(max_tokens=arguments.answer_len, temperature=0, ignore_eos=True)
    sent = []
    for turn in range(arguments.turns):
        prompts = [conversation.say(turn) for conversation in conversations]
        sent += prompts
        for conversation, output in zip(conversations, llm.generate(prompts, params), strict=True):
            conversation.hear(output.token_ids)
    return sent


def run_few_shot(llm: LLM, arguments: argparse.Namespace) -> list[list[int]]:
    """Returns the prompts in the order they were sent."""
    prompts = few_shot(
        arguments.tasks,
        arguments.questions,
        arguments.shots_len,
        arguments.question_len,
        llm.info.vocab_size,
    )
    params = SamplingParams(max_tokens=arguments.answer_len, temperature=0, ignore_eos=True)
    llm.generate(prompts, params)
    return prompts


def summary(
    prompts: list[list[int]], page_size: int, before: EngineStats, after: EngineStats, wall_s: float
) -> dict[str, Any]:
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    cached_tokens = after.cached_tokens - before.cached_tokens
    output_tokens = after.generated_tokens - before.generated_tokens
    return {
        "requests": len(prompts),
        "prompt_tokens": prompt_tokens,
        "computed_prompt_tokens": prompt_tokens - cached_tokens,
        "hit_rate": round(cached_tokens / prompt_tokens, 4),
        "max_hit_rate": round(shareable_tokens(prompts, page_size) / prompt_tokens, 4),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(prompts) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 1),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / wall_s, 1),
    }


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    figures = {}
    for name, run in (("multi-turn", run_multi_turn), ("few-shot", run_few_shot)):
        llm.generate(make_prompts(2, 32, 1, llm.info.vocab_size), SamplingParams(max_tokens=4))
        llm.flush_cache()
        before = llm.stats()
        start = time.perf_counter()
        prompts = run(llm, arguments)
        wall_s = time.perf_counter() - start
        figures[name] = summary(prompts, llm.info.page_size, before, llm.stats(), wall_s)
    return figures


def main() -> None:
    parser = engines.engine_parser(__doc__)
    engines.add_process(parser)
    for name, default in (
        ("conversations", 16), ("turns", 4), ("system-len", 128), ("message-len", 48),
        ("tasks", 4), ("questions", 16), ("shots-len", 384), ("question-len", 32),
        ("answer-len", 16),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if arguments.prefix_cache is not None:
        parser.error("prefix_cache is what this bench turns on and off itself")
    config = engines.engine_config(arguments)
    by_cache, device = {}, ""
    for name, prefix_cache in (("cache on", True), ("cache off", False)):
        chosen = dataclasses.replace(config, prefix_cache=prefix_cache)
        with engines.start(chosen, arguments.process) as llm:
            by_cache[name] = measure(llm, arguments)
            device = engines.device_name(llm.info)
    figures: dict[str, Any] = {}
    for load in ("multi-turn", "few-shot"):
        figures[load] = {name: found[load] for name, found in by_cache.items()}
        on, off = (figures[load][name]["wall_s"] for name in ("cache on", "cache off"))
        figures[load]["speedup"] = round(off / on, 3)
    record.store("prefix", device, figures)


if __name__ == "__main__":
    main()
