"""Decode steps and prefill through `LLM.generate`, whole loop counted: batch by batch, offline.

Run: python -m bench.latency MODEL [--load-format dummy] [--batches 1,8,32] [--prefill
1x2048,8x2048] A step is (time for `--long` tokens - time for `--short`) / the difference, so that
prefill is left out.
"""

import argparse
import statistics
import time
from typing import Any

from bench import record
from bench.trace import make_prompts
from jaxserve import LLM, SamplingParams


def generate_s(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    return time.perf_counter() - start


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    vocab = llm.info.vocab_size
    decode: dict[str, Any] = {}
    seed = 0
    for batch in map(int, filter(None, arguments.batches.split(","))):
        times = []
        for _ in range(arguments.repeats + 1):
            seconds = []
            for tokens in (arguments.short, arguments.long):
                seed += 1
                prompts = make_prompts(batch, arguments.input_len, seed, vocab)
                seconds.append(generate_s(llm, prompts, tokens))
            times.append((seconds[1] - seconds[0]) / (arguments.long - arguments.short))
        step = statistics.median(times[1:])  # the first pair warms up
        decode[f"batch {batch}"] = {
            "ms_per_step": round(step * 1e3, 3),
            "tokens_per_s": round(batch / step, 1),
            "all_ms": [round(t * 1e3, 3) for t in times],
        }
        print(f"batch {batch}: {step * 1e3:.3f} ms a step", flush=True)
    prefill: dict[str, Any] = {}
    for case in filter(None, arguments.prefill.split(",")):
        count, length = map(int, case.split("x"))
        times = []
        for _ in range(arguments.repeats + 1):
            seed += 1
            times.append(generate_s(llm, make_prompts(count, length, seed, vocab), 1))
        seconds = statistics.median(times[1:])
        prefill[case] = {
            "ms": round(seconds * 1e3, 2),
            "tokens_per_s": round(count * length / seconds),
        }
        print(f"prefill {case}: {seconds * 1e3:.1f} ms", flush=True)
    return {"decode": decode, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        load_format=arguments.load_format,
        attention=arguments.attention,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_batched_tokens=arguments.max_batched_tokens,
        prefix_cache=False,
        on_progress=lambda progress: print(progress.stage, progress.text, flush=True),
    ) as llm:
        info = llm.info
        figures = measure(llm, arguments)
    device = record.cpu_name() if info.platform == "cpu" else info.device_kind
    figures["start"] = {
        "startup_s": round(info.startup_s, 1),
        "compile_s": round(info.compile_s, 1),
        "num_compiled": info.num_compiled,
        "num_pages": info.num_pages,
        "attention": info.attention,
    }
    record.store("latency", device, figures)


if __name__ == "__main__":
    main()
