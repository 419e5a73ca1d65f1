"""The GPU prefill kernel on the card: errors against the float32 reference, TFLOP/s by config.

    python -m bench.prefill_probe [--json FILE] [--budget SECONDS]

Prints a line a result as it comes. Time is of the kernel alone, many calls in one program, each
writing over the output of the one before.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import gpu_prefill, reference
from pallas_kernels.paged_attention.cases import (
    GPT_OSS_20B,
    LLAMA_8B,
    MISTRAL_7B,
    Case,
    make_inputs,
)

MIXED = ((1, 700), (1, 33), (300, 1000), (5, 5), (129, 640), (17, 17))
NUMERICS = (
    Case("chunk-of-8k", ((256, 8192),), **LLAMA_8B),
    Case("mixed", MIXED, **LLAMA_8B, padding_rows=2, padding_tokens=9),
    Case("mixed-page64-f16", MIXED, **{**LLAMA_8B, "dtype": "float16"}, page_size=64),
    Case("window", MIXED, **{**MISTRAL_7B, "sliding_window": 200}, padding_tokens=3),
    Case("gpt-oss-local", MIXED, **GPT_OSS_20B, sliding_window=128),
    Case("soft-cap", MIXED, **LLAMA_8B, soft_cap=30.0, sinks=True, page_size=128),
    Case("three-to-one", MIXED, num_heads=9, num_kv_heads=3, head_dim=64, padding_tokens=1),
    Case("one-token-chunks", ((1, 100), (2, 9), (3, 515), (2, 2)), **LLAMA_8B, page_size=32),
)
TIMED = (
    Case("8192", ((8192, 8192),), **LLAMA_8B),
    Case("8192-page64", ((8192, 8192),), **LLAMA_8B, page_size=64),
    Case("2048-of-10240", ((2048, 10240),), **LLAMA_8B),
    Case("8x2048", ((2048, 2048),) * 8, **LLAMA_8B),
    Case("4x512-ragged", ((512, 512), (400, 900), (612, 612), (524, 2000)), **LLAMA_8B),
    Case("8192-window", ((8192, 8192),), **MISTRAL_7B),
    Case("8192-head64", ((8192, 8192),), **GPT_OSS_20B),
)
Config = gpu_prefill.Config
CONFIGS = (
    Config(block_kv=128, stages=2),
    Config(block_kv=128, stages=2, take_turns=False),
    Config(block_kv=64, stages=4),
    Config(block_kv=128, stages=2, overlap=False),
    Config(block_kv=64, stages=3, take_turns=False),
)


def options(case, sinks):
    return {
        "sm_scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
    }


def compare(case):
    """Largest error against the reference in float32, over a cache that is NaN where unused."""
    q, k, v, kv_pages, meta, sinks = make_inputs(case, poison=True)
    kv_pages = jax.jit(reference.write_kv)(k, v, kv_pages, meta.slot_mapping)
    given = options(case, sinks)
    before = jnp.full_like(q, 7)
    out = jax.jit(functools.partial(gpu_prefill.attend_chunks, **given))(q, before, kv_pages, meta)
    first, end = int(meta.num_decode_rows), int(meta.query_start[-1])
    first = int(meta.query_start[first])
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(reference.attend_chunks, **given))(
            *(a.astype(jnp.float32) for a in (q, before, kv_pages)), meta
        )
    error = np.abs(np.asarray(out, np.float32) - np.asarray(expected))[first:end].max()
    rest = np.asarray(out, np.float32)[np.r_[:first, end : len(q)]]
    return {"max_error": float(error), "rest_untouched": bool((rest == 7).all())}


def random_step(case):
    """Inputs made on the device: values, and scattered pages."""
    keys = jax.random.split(jax.random.key(0), 2)
    dtype, page_size = jnp.dtype(case.dtype), case.page_size
    row_pages = [-(-kv_len // page_size) for _, kv_len in case.rows]
    num_pages = sum(row_pages) + 1
    num_tokens = sum(query_len for query_len, _ in case.rows)
    q = jax.random.normal(keys[0], (num_tokens, case.num_heads, case.head_dim), dtype)
    shape = (num_pages, page_size, 2 * case.num_kv_heads, case.head_dim)
    kv_pages = jax.random.normal(keys[1], shape, dtype)
    *_, meta, _ = make_inputs(dataclasses.replace(case, num_heads=1, num_kv_heads=1, head_dim=1))
    sinks = jnp.zeros(case.num_heads) if case.sinks else None
    return q, kv_pages, meta, sinks


def measure(case, config, repeats=7):
    """Median, least and greatest seconds of a call; whether two runs agree bit for bit."""
    q, kv_pages, meta, sinks = random_step(case)
    calls = max(1, min(40, int(2e13 / case.flops)))
    plan = jax.jit(gpu_prefill.make_plan, static_argnums=(1, 2))(meta, len(q), case.sliding_window)
    attend = jax.jit(
        functools.partial(gpu_prefill.attend_chunks, config=config, **options(case, None))
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def many(q, out, kv_pages, meta, plan, sinks):
        for _ in range(calls):
            out = attend(q, out, kv_pages, meta, plan=plan, sinks=sinks)
        return out

    rest = kv_pages, meta, plan, sinks
    first = many(q, jnp.zeros_like(q), *rest)
    second = many(q, jnp.ones_like(q), *rest)
    same = bool((first == second).all())
    out, times = second, []
    for _ in range(repeats):
        jax.block_until_ready(out)
        start = time.perf_counter()
        out = jax.block_until_ready(many(q, out, *rest))
        times.append((time.perf_counter() - start) / calls)
    return {
        "median_us": statistics.median(times) * 1e6,
        "min_us": min(times) * 1e6,
        "max_us": max(times) * 1e6,
        "tflops": case.flops / statistics.median(times) / 1e12,
        "calls": calls,
        "repeatable": same,
        "finite": bool(jnp.isfinite(first).all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    out = os.environ.get("OUT", ".")
    parser.add_argument("--json", default=os.path.join(out, "prefill_probe.json"))
    parser.add_argument("--budget", type=float, default=85.0, help="seconds; begins nothing after")
    args = parser.parse_args()
    begin = time.perf_counter()
    results = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "results": []}

    def do(kind, case, config, work):
        if time.perf_counter() - begin > args.budget:
            print("out of time:", kind, case.name, config)
            return None
        start = time.perf_counter()
        try:
            figures = work()
        except Exception as error:  # the next one may work
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        record = {"kind": kind, "case": case.name, "took_s": time.perf_counter() - start, **figures}
        if config is not None:
            record["config"] = dataclasses.asdict(config)
        results["results"].append(record)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
        shown.pop("config", None)
        short = config and (config.block_kv, config.stages, config.take_turns, config.overlap)
        print(shown, short or "", flush=True)
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
        return figures

    for case in NUMERICS[:3]:
        do("numerics", case, None, functools.partial(compare, case))
    best, rate = CONFIGS[0], 0.0
    for config in CONFIGS:
        figures = do("time", TIMED[0], config, functools.partial(measure, TIMED[0], config))
        if figures and figures.get("tflops", 0) > rate:
            best, rate = config, figures["tflops"]
    *others, windowed, case = TIMED[1:]
    for other in others:
        do("time", other, best, functools.partial(measure, other, best))
    for config in (CONFIGS[0], CONFIGS[2]):
        do("time", windowed, config, functools.partial(measure, windowed, config))
    config = Config(block_kv=128, stages=4, take_turns=best.take_turns, overlap=best.overlap)
    do("time", case, config, functools.partial(measure, case, config))
    for case in NUMERICS[3:]:
        do("numerics", case, None, functools.partial(compare, case))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
