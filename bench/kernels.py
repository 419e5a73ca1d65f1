"""Paged attention, each implementation on each named case, against the rates this device reaches
in the same run: a large copy for bytes, a large matrix product for operations.

Run: python -m bench.kernels [--cases REGEX] [--impls reference,gpu] [--repeats 20]
A time is one call's, out of a chain of calls in one program, so that dispatch does not count; small
caches are taken in turns, so that none is found in the device's own cache.
"""

import argparse
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from pallas_kernels.dispatch import choose
from pallas_kernels.paged_attention import IMPLEMENTATIONS, AttentionSpec, paged_attention
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.cases import CASES, Case, make_inputs

CHAIN = 8  # calls in a program
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
    )


def measure(
    case: Case, impl: Implementation, repeats: int, peak: dict[str, float]
) -> dict[str, Any]:
    q, k, v, kv_pages, meta, sinks = make_inputs(case, on_device=True)
    attend: Callable[..., Any] = functools.partial(
        paged_attention,
        sm_scale=case.head_dim**-0.5,
        kind=case.kind,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )
    num_pools = max(1, min(CHAIN, COLD_BYTES // kv_pages.nbytes))
    pools = (kv_pages, *(jnp.copy(kv_pages) for _ in range(num_pools - 1)))

    def chain(pools, q, k, v, meta, sinks):
        pools = list(pools)
        for i in range(CHAIN):
            out, pools[i % num_pools] = attend(
                q, k, v, pools[i % num_pools], meta, sinks=sinks, impl=impl
            )
            q = q + out * jnp.asarray(1e-3, q.dtype)  # the next call waits for this one
        return q, tuple(pools)

    impls: list[Implementation] = [impl, "reference"]
    try:
        start = time.perf_counter()
        compiled = jax.jit(chain, donate_argnums=0).lower(pools, q, k, v, meta, sinks).compile()
        compile_s = time.perf_counter() - start
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    state = [pools]

    def call():
        out, state[0] = compiled(state[0], q, k, v, meta, sinks)
        return out

    times = [t / CHAIN for t in seconds(call, repeats)]
    memory = compiled.memory_analysis()
    best = float(np.median(times))
    result = {
        **record.spread(times),
        "bytes_rate_GB_s": round(case.kv_bytes / best / 1e9, 1),
        "TFLOP_s": round(case.flops / best / 1e12, 2),
        "share_of_copy_rate": round(case.kv_bytes / best / peak["bytes_s"], 3),
        "share_of_matmul_rate": round(case.flops / best / peak["flops_s"], 3),
        "compile_s": round(compile_s, 1),
        "temporaries_bytes": memory.temp_size_in_bytes if memory else None,
    }
    if impl != "reference":
        outputs = [
            jax.jit(functools.partial(attend, impl=one))(
                q, k, v, jnp.copy(state[0][0]), meta, sinks=sinks
            )[0].astype(jnp.float32)
            for one in impls
        ]
        result["max_difference"] = float(jnp.abs(outputs[0] - outputs[1]).max())
    return result


def main() -> None:
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="smollm2" if on_cpu else ".", help="regex of names")
    parser.add_argument(
        "--impls", default="reference" if on_cpu else f"reference,{device.platform}"
    )
    parser.add_argument("--repeats", type=int, default=5 if on_cpu else 20)
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
        summary = {
            impl: found.get("unsupported")
            or f"{found['median_ms'] * 1e3:.1f} us, {found['share_of_copy_rate']:.0%} of copy, "
            f"{found['share_of_matmul_rate']:.0%} of matmul"
            for impl, found in by_impl.items()
        }
        print(case.name, summary, flush=True)
    name = record.cpu_name() if on_cpu else device.device_kind
    record.store(
        "kernels",
        name,
        {"measured_peak": peak, "warm_up": WARM_UP, "calls_in_a_chain": CHAIN, "cases": figures},
    )


if __name__ == "__main__":
    main()
