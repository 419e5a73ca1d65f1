"""Decode steps and prefill through `LLM.generate`, whole loop counted: batch by batch, offline.

Run: python -m bench.latency [MODEL] [--load-format dummy] [--batches 1,8,32] [--prefill
1x2048,8x2048] A step is (time for `--long` tokens - time for `--short`) / the difference, so that
prefill is left out.

The floor of a decode step is the bytes that it must read, at the rate that the device copies at:
    (weights + batch x context x KV bytes of a token) / (devices x rate)
- weights: all but an embedding that isn't also the output's: of that a step reads a row a sequence
- context: the mean over the steps that are timed, input + (short + long) / 2; in a layer with a
  sliding window, the window at most
- rate: 4.3 TB/s for an H200; elsewhere a large copy's, read and write counted, in the same run
`share_of_floor` is floor / measured: 1 is all that the memory could do.
`engine_ms`: means of the case's steps by kind, from when a step was sent or the one before read
until it is read, and of the host's work between two waits for the device.
"""

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np

from bench import engines, record
from bench.kernels import copy_rate
from bench.trace import make_prompts
from checkpoints.resolve import resolve
from jaxserve import LLM, SamplingParams
from jaxserve.models.config import ModelConfig
from jaxserve.types import EngineInfo, EngineStats

COPY_RATE = {"NVIDIA H200": 4.3e12}
"""Bytes/s, by device kind."""
COPY_REPEATS = 5


def generate_s(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    return time.perf_counter() - start


def engine_ms(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Means of the steps between two readings, and of the host's work between two waits."""
    means = {}
    for name, new in {**after.step_seconds, "host": after.host_gap_seconds}.items():
        old = {**before.step_seconds, "host": before.host_gap_seconds}.get(name)
        count = new.count - (old.count if old else 0)
        if count:
            means[name] = round((new.total - (old.total if old else 0)) / count * 1e3, 3)
    return means


def step_bytes(info: EngineInfo, model: ModelConfig, batch: int, context: float) -> float:
    """Bytes that a decode step must read, over all devices (the module's docstring says why)."""
    weight_bytes = info.weight_bytes
    if not model.tie_word_embeddings:
        itemsize = 4 if info.dtype == "float32" else 2
        weight_bytes -= (info.vocab_size - batch) * model.hidden_size * itemsize
    token_bytes = info.kv_bytes / ((info.num_pages + 1) * info.page_size)  # page 0 is counted too
    windows = [model.window(layer) or context for layer in range(model.num_layers)]
    return weight_bytes + batch * token_bytes * float(np.mean(np.minimum(windows, context)))


def add_floor(decode: dict[str, Any], rate: float, num_devices: int) -> None:
    """Adds `floor_ms` and `share_of_floor` to what was measured batch by batch."""
    for figures in decode.values():
        floor_ms = figures["step_bytes"] / (rate * num_devices) * 1e3
        figures["floor_ms"] = round(floor_ms, 3)
        figures["share_of_floor"] = round(floor_ms / figures["ms_per_step"], 3)


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    vocab = llm.info.vocab_size
    model = ModelConfig.from_hf(resolve(arguments.model).config)
    context = arguments.input_len + (arguments.short + arguments.long) / 2
    decode: dict[str, Any] = {}
    seed = 0
    for batch in map(int, filter(None, arguments.batches.split(","))):
        times, before = [], llm.stats()
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
            "step_bytes": round(step_bytes(llm.info, model, batch, context)),
            "all_ms": [round(t * 1e3, 3) for t in times],
            "engine_ms": engine_ms(before, llm.stats()),
        }
        print(f"batch {batch}: {step * 1e3:.3f} ms a step", flush=True)
    prefill: dict[str, Any] = {}
    for case in filter(None, arguments.prefill.split(",")):
        count, length = map(int, case.split("x"))
        times, before = [], llm.stats()
        for _ in range(arguments.repeats + 1):
            seed += 1
            times.append(generate_s(llm, make_prompts(count, length, seed, vocab), 1))
        seconds = statistics.median(times[1:])
        prefill[case] = {
            "ms": round(seconds * 1e3, 2),
            "tokens_per_s": round(count * length / seconds),
            "all_ms": [round(t * 1e3, 2) for t in times],
            "engine_ms": engine_ms(before, llm.stats()),
        }
        print(f"prefill {case}: {seconds * 1e3:.1f} ms", flush=True)
    return {"decode": decode, "prefill": prefill}


def main() -> None:
    parser = engines.engine_parser(__doc__, prefix_cache=False)
    engines.add_process(parser)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    with engines.start(engines.engine_config(arguments), arguments.process) as llm:
        info = llm.info
        figures = measure(llm, arguments)
    rate = COPY_RATE.get(info.device_kind)
    if rate is None:
        gc.collect()  # whatever the engine still held on the device
        rate = copy_rate(info.platform, COPY_REPEATS)
    add_floor(figures["decode"], rate, int(np.prod(list(info.mesh.values()))))
    for batch, found in figures["decode"].items():
        print(f"{batch}: {found['share_of_floor']:.1%} of the floor, {found['floor_ms']:.3f} ms")
    figures["copy_rate_GB_s"] = round(rate / 1e9, 1)
    figures["start"] = engines.start_figures(info)
    record.store("latency", engines.device_name(info), figures)


if __name__ == "__main__":
    main()
