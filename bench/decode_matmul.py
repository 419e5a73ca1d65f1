"""Products of a step on the card: microseconds by kernel configuration, beside XLA's.

Run: python -m bench.decode_matmul [--rows 1,8,32,64,128,256] [--products qkv,o,gate_up,down,head]
Each product is timed in a chain of 12 with weights of their own (more than the L2 cache holds) and
one small fusion between, in one program; GB/s count the weight once. Of more than 256 rows, as
prefills have, only the gated one has a kernel of ours.
"""

import argparse
import concurrent.futures
import functools
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from bench import record
from pallas_kernels.decode_matmul import gpu
from pallas_kernels.decode_matmul.api import BLOCK_ROWS, MAX_ROWS
from pallas_kernels.decode_matmul.gpu import Config
from pallas_kernels.matmul.gpu import Config as ManyRowsConfig
from pallas_kernels.matmul.gpu import gated_matmul

LINKS = 12
PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[Config, ...]]] = {
    "qkv": (
        (6144, 4096),
        (
            Config(96, 64, 2),
            Config(96, 128, 2),
            Config(48, 128, 1),
            Config(192, 64, 4),
        ),
    ),
    "o": (
        (4096, 4096),
        (
            Config(64, 64, 2),
            Config(64, 128, 2),
            Config(128, 64, 4),
            Config(32, 128, 1),
        ),
    ),
    "gate_up": (
        (14336, 2, 4096),
        (
            Config(112, 64),
            Config(112, 128),
            Config(56, 64),
            Config(64, 64),
        ),
    ),
    "down": (
        (4096, 14336),
        (
            Config(128, 64, 4),
            Config(64, 128, 2),
            Config(128, 128, 4),
            Config(256, 64, 8),
        ),
    ),
    "head": ((128256, 4096), (Config(128, 64), Config(192, 64), Config(96, 128))),
}
# Of two blocks of rows.
WIDE: dict[str, tuple[Config, ...]] = {
    "qkv": (Config(96, 64),),
    "o": (Config(64, 64), Config(128, 64, 2)),
    "gate_up": (Config(112, 64), Config(112, 32), Config(64, 64)),
    "down": (Config(128, 64, 2), Config(64, 64)),
}
MANY_ROWS = {"gate_up": (ManyRowsConfig(128), ManyRowsConfig(112))}


def configs_of(name: str, rows: int) -> tuple[Any, ...]:
    if rows > MAX_ROWS:
        return MANY_ROWS.get(name, ())
    return PRODUCTS[name][1] if rows <= BLOCK_ROWS else WIDE.get(name, ())


def product(x, weight, config: Config | ManyRowsConfig | None):
    gated = weight.ndim == 3
    if isinstance(config, ManyRowsConfig):
        return gated_matmul(x, weight, config=config)
    if config is not None:
        return gpu.decode_matmul(x, weight, config=config, gated=gated)
    flat = weight.reshape(-1, weight.shape[-1])
    if gated:
        y = jnp.einsum("TI,OI->TO", x, flat).reshape(len(x), -1, 2)
        return jax.nn.silu(y[..., 0]) * y[..., 1]
    return jnp.einsum("TI,OI->TO", x, flat, preferred_element_type=jnp.float32)[None]


def chain(x, weights, *, config: Config | ManyRowsConfig | None):
    call = jax.jit(functools.partial(product, config=config))
    for weight in weights:
        y = jax.lax.optimization_barrier(call(x, weight))  # all of it, not what the next one reads
        y = y if y.ndim == 2 else y.sum(0)
        repeats = -(-x.shape[1] // y.shape[1])
        y = jnp.tile(y, (1, repeats))[:, : x.shape[1]]
        x = (x + y * 0.01).astype(x.dtype)
    return x


def compile_chain(rows: int, shape: tuple[int, ...], config: Config | ManyRowsConfig | None) -> Any:
    x = jax.ShapeDtypeStruct((rows, shape[-1]), jnp.bfloat16)
    links = 3 if shape[0] > 100_000 else LINKS
    weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * links
    return jax.jit(functools.partial(chain, config=config)).lower(x, weights).compile()


def seconds(function, *args, calls: int = 4, repeats: int = 5) -> float:
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,64,128,256")
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--budget", type=float, default=500, help="seconds")
    arguments = parser.parse_args()
    stop = time.perf_counter() + arguments.budget
    cases = []
    for name in arguments.products.split(","):
        shape, _ = PRODUCTS[name]
        for rows in map(int, arguments.rows.split(",")):
            cases += [(name, shape, rows, "xla", None)]
            cases += [(name, shape, rows, str(c), c) for c in configs_of(name, rows)]
    compiled: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        futures = [threads.submit(compile_chain, c[2], c[1], c[4]) for c in cases]
        for case, future in zip(cases, futures, strict=True):
            try:
                compiled[case[:4]] = future.result()
            except Exception as error:  # a configuration that does not fit; the next one may
                compiled[case[:4]] = str(error)[:300]
    print(f"compiled, {stop - time.perf_counter():.0f} s left", flush=True)
    figures: dict[str, Any] = {}
    weights: list[jax.Array] = []
    last = None
    for name, shape, rows, label, config in cases:
        if time.perf_counter() > stop:
            break
        key = f"{name} {rows}"
        function = compiled[name, shape, rows, label]
        if isinstance(function, str):
            figures.setdefault(key, {})[label] = function
            print(key, label, function, flush=True)
            continue
        links = 3 if shape[0] > 100_000 else LINKS
        if last != name:
            weights.clear()
            keys = jax.random.split(jax.random.key(0), links)
            weights += [jax.random.normal(k, shape, jnp.bfloat16) / 64 for k in keys]
            last = name
        x = jax.random.normal(jax.random.key(1), (rows, shape[-1]), jnp.bfloat16)
        us = seconds(function, x, weights) / links * 1e6
        entry: dict[str, Any] = {"us": round(us, 2), "GB/s": round(weights[0].nbytes / us / 1e3)}
        entry["TFLOP/s"] = round(2 * rows * weights[0].size / us / 1e6)
        if config is not None:
            got = jax.jit(functools.partial(product, config=config))(x, weights[0])
            want = jax.jit(functools.partial(product, config=None))(
                x.astype(jnp.float32), weights[0].astype(jnp.float32)
            )
            got = got if got.ndim == 2 else got.sum(0)[None]
            entry["error"] = round(float(jnp.max(jnp.abs(got - want))), 4)
        figures.setdefault(key, {})[label] = entry
        print(key, label, entry, flush=True)
    record.store("decode_matmul", jax.devices()[0].device_kind, figures)


if __name__ == "__main__":
    main()
