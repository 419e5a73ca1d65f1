"""Where a decode step's time goes on the device: kernels by name, and the gaps between them.

Run: python -m bench.step_profile MODEL [--load-format dummy] [--batches 1,64] [--tokens 64]
Kernel times come from JAX's profiler, under which XLA doesn't use command buffers: gaps are larger
than in service.
"""

import argparse
import collections
import re
from typing import Any

from bench import record
from bench.device_events import recorded
from bench.trace import make_prompts
from jaxserve import LLM, SamplingParams

TOP = 25


def measure(llm: LLM, batch: int, tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = make_prompts(batch, 128, batch, llm.info.vocab_size)
    llm.generate(prompts, params)
    before = llm.stats().num_steps
    events = recorded(lambda: llm.generate(prompts, params))
    steps = llm.stats().num_steps - before
    busy: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    gap, end = 0, None
    for name, start, duration in events:
        kind = re.sub(r"[_.]?\d+$", "", name)
        busy[kind] += duration
        count[kind] += 1
        if end is not None and start > end:
            gap += start - end
        end = max(end or 0, start + duration)
    per_step = 1e-3 / max(steps, 1)
    return {
        "steps": steps,
        "busy_us_per_step": round(sum(busy.values()) * per_step, 1),
        "gaps_us_per_step": round(gap * per_step, 1),
        "kernels": [
            {
                "name": name,
                "us_per_step": round(total * per_step, 2),
                "calls_per_step": round(count[name] / max(steps, 1), 2),
            }
            for name, total in busy.most_common(TOP)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        load_format=arguments.load_format,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_batched_tokens=arguments.max_batched_tokens,
        prefix_cache=False,
    ) as llm:
        figures = {
            f"batch {batch}": measure(llm, batch, arguments.tokens)
            for batch in map(int, arguments.batches.split(","))
        }
        device = llm.info.device_kind
        if llm.info.platform == "cpu":
            device = record.cpu_name()
    record.store("step_profile", device, figures)


if __name__ == "__main__":
    main()
