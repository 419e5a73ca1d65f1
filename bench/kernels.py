"""Paged attention, each implementation on each named case, against the rates this device reaches
in the same run: a large copy for bytes, a large matrix product for operations.

Run: python -m bench.kernels [--cases REGEX] [--impls reference,gpu] [--repeats 20] [--sweep]
A time is one call's: what a chain of 12 calls in one program takes more than one of 4, over 8, so
that dispatch does not count; small caches are taken in turns, so that none is found in the device's
own cache. `device_us` are the kernels' own times, from JAX's profiler. --sweep: also the GPU decode
kernel with each of the settings that fit, for `gpu_decode.TUNED`.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.device_events import recorded
from pallas_kernels.dispatch import choose
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionSpec,
    gpu,
    gpu_decode,
    paged_attention,
    write_kv,
)
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.cases import CASES, Case, make_inputs

CHAINS = (4, 12)  # calls in a program
WARM_UP = 2
COLD_BYTES = 512 << 20  # of caches in rotation: more than any device keeps on chip


def seconds(call, repeats: int) -> list[float]:
    """One entry a call, each waited for."""
    for _ in range(WARM_UP):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times


def copy_rate(platform: str, repeats: int) -> float:
    """Bytes/s of a copy, read and write both counted, best seen."""
    x = jnp.ones((64 << 20) if platform == "cpu" else (512 << 20), jnp.float32)
    bytes_read_and_written = 2 * x.nbytes
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = [x]
    del x

    def step():
        state[0] = copy(state[0])
        return state[0]

    return bytes_read_and_written / min(seconds(step, repeats))


def matmul_rate(platform: str, repeats: int) -> float:
    """FLOP/s of a matrix product, best seen."""
    n, dtype = (2048, jnp.float32) if platform == "cpu" else (8192, jnp.bfloat16)
    a = jnp.ones((n, n), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * n**3 / min(seconds(lambda: product(a), repeats))


def spec_of(case: Case) -> AttentionSpec:
    return AttentionSpec(
        case.kind,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        case.dtype,
        case.sliding_window,
        case.soft_cap,
        case.sinks,
        case.queries_per_row,
    )


def settings(spec: AttentionSpec) -> list[gpu_decode.Config]:
    """All settings of the GPU decode kernel that differ in speed and fit."""
    default, queries = gpu_decode.default_config(spec), spec.group * spec.queries_per_row
    found = []
    for pairs, stages, inside in itertools.product((1, 2), (2, 3, 4, 6, 8), (True, False)):
        workers = default.workers // default.pairs * pairs
        for query_buffers in (2, 1):
            config = gpu_decode.Config(workers, pairs, stages, query_buffers, inside)
            if config.shared_bytes(spec.head_dim, queries) <= gpu_decode.SHARED_BYTES:
                found.append(config)
                break
    return found


def measure(
    case: Case,
    impl: Implementation,
    repeats: int,
    peak: dict[str, float],
    config: gpu_decode.Config | None = None,
) -> dict[str, Any]:
    """config: of the GPU decode kernel, instead of what the API takes."""
    q, k, v, kv_pages, meta, sinks = make_inputs(case, on_device=True)
    options: dict[str, Any] = {
        "sm_scale": case.head_dim**-0.5,
        "kind": case.kind,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
    }
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    attend: Callable[..., Any] = functools.partial(paged_attention, mesh=mesh, **options)
    num_pools = max(1, min(min(CHAINS), COLD_BYTES // kv_pages.nbytes))
    pools = (kv_pages, *(jnp.copy(kv_pages) for _ in range(num_pools - 1)))

    def one(q, k, v, kv_pages, meta, sinks):
        if config is None:
            return attend(q, k, v, kv_pages, meta, sinks=sinks, impl=impl)
        kv_pages = write_kv(k, v, kv_pages, meta.slot_mapping)
        return gpu.attend(q, kv_pages, meta, sinks=sinks, config=config, **options), kv_pages

    def chain(length, pools, q, k, v, meta, sinks):
        pools = list(pools)
        for i in range(length):
            out, pools[i % num_pools] = one(q, k, v, pools[i % num_pools], meta, sinks)
            q = q + out * jnp.asarray(1e-3, q.dtype)  # the next call waits for this one
        return q, tuple(pools)

    state = [pools]
    del pools, kv_pages
    compiled: Any = None
    times: list[Any] = []
    compile_s = 0.0
    for length in CHAINS:
        run = jax.jit(functools.partial(chain, length), donate_argnums=0)
        start = time.perf_counter()
        try:
            compiled = run.lower(state[0], q, k, v, meta, sinks).compile()
        except NotImplementedError as error:
            return {"unsupported": str(error)}
        compile_s += time.perf_counter() - start

        def call(compiled=compiled):
            out, state[0] = compiled(state[0], q, k, v, meta, sinks)
            return out

        times.append(seconds(call, repeats))
    fewer, more = CHAINS
    times = [(t - float(np.median(times[0]))) / (more - fewer) for t in times[1]]
    best = float(np.median(times))
    memory = compiled.memory_analysis()
    result = {
        **record.spread(times),
        "bytes_rate_GB_s": round(case.kv_bytes / best / 1e9, 1),
        "TFLOP_s": round(case.flops / best / 1e12, 2),
        "share_of_copy_rate": round(case.kv_bytes / best / peak["bytes_s"], 3),
        "share_of_matmul_rate": round(case.flops / best / peak["flops_s"], 3),
        "compile_s": round(compile_s, 1),
        "temporaries_bytes": memory.temp_size_in_bytes if memory else None,
    }
    if jax.default_backend() == "gpu":
        kernels: collections.Counter[str] = collections.Counter()
        for name, _, duration in recorded(lambda: jax.block_until_ready(call())).kernels:
            kernels[re.sub(r"[_.]?\d+$", "", name)] += duration
        result["device_us"] = {
            name: round(total / more / 1e3, 2) for name, total in kernels.most_common(8)
        }
    if impl != "reference":
        kv_pages = jnp.copy(state[0][0])
        out = jax.jit(one)(q, k, v, kv_pages, meta, sinks)[0]
        expected = jax.jit(functools.partial(attend, impl="reference"))(
            q, k, v, kv_pages, meta, sinks=sinks
        )[0]
        result["max_difference"] = float(
            jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max()
        )
    return result


def summary(found: dict[str, Any]) -> str:
    return found.get("unsupported") or (
        f"{found['median_ms'] * 1e3:.1f} us, {found['share_of_copy_rate']:.0%} of copy, "
        f"{found['share_of_matmul_rate']:.0%} of matmul, {found.get('device_us', {})}"
    )


def main() -> None:
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="smollm2" if on_cpu else ".", help="regex of names")
    parser.add_argument(
        "--impls", default="reference" if on_cpu else f"reference,{device.platform}"
    )
    parser.add_argument("--repeats", type=int, default=5 if on_cpu else 20)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    impls: list[Implementation] = [
        impl for impl in IMPLEMENTATIONS if impl in arguments.impls.split(",")
    ]
    peak = {
        "bytes_s": copy_rate(device.platform, arguments.repeats),
        "flops_s": matmul_rate(device.platform, arguments.repeats),
    }
    figures = {}
    for case in CASES:
        if not re.search(arguments.cases, case.name):
            continue
        by_impl = {impl: measure(case, impl, arguments.repeats, peak) for impl in impls}
        shape = {name: value for name, value in vars(case).items() if name not in ("name", "rows")}
        figures[case.name] = {
            "shape": {**shape, "rows": len(case.rows), "kv_bytes": case.kv_bytes},
            "chosen": choose(device.platform, device.device_kind, spec_of(case)),
            **by_impl,
        }
        print(case.name, {impl: summary(found) for impl, found in by_impl.items()}, flush=True)
        if arguments.sweep and case.kind == "decode" and not gpu.unsupported(spec_of(case)):
            swept = []
            for config in settings(spec_of(case)):
                found = measure(case, "gpu", arguments.repeats, peak, config)
                swept.append({"config": dataclasses.asdict(config), **found})
                print(" ", config, summary(found), flush=True)
            swept.sort(key=lambda found: found["median_ms"])
            figures[case.name]["sweep"] = swept
            print("  best:", swept[0]["config"], flush=True)
    name = record.cpu_name() if on_cpu else device.device_kind
    record.store(
        "kernels",
        name,
        {"measured_peak": peak, "warm_up": WARM_UP, "calls_in_chains": CHAINS, "cases": figures},
    )


if __name__ == "__main__":
    main()
