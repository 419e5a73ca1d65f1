"""The bare decode step on the device, without engine or host loop: milliseconds by batch.

Run: python -m bench.step MODEL_FOLDER [--batches 1,64,256] [--context 256] [--variants ours,xla]
Random weights and cache: zeros would draw less of the power that limits steps of many rows (9.8 ms
for 8.9 at 256, H200). Steps are sent one after the other without waiting; the next token is the
likeliest.
"""

import argparse
import collections
import functools
import json
import pathlib
import re
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.device_events import Event, recorded
from jaxserve.config import MeshConfig
from jaxserve.execution import runner as runners
from jaxserve.execution import step
from jaxserve.execution.buckets import Buckets, StepShape
from jaxserve.layers import linear
from jaxserve.models import registry
from pallas_kernels.paged_attention import gpu_rotate
from sharding.mesh import make_mesh

PAGE_SIZE = 16
PAGES = 256
CHOOSE, CHOOSE_ADDING, CHOOSE_GATED = linear.choose, linear.choose_adding, linear.choose_gated
ADDS_IN_KERNEL = linear.adds_in_kernel
ROTATE_UNSUPPORTED = gpu_rotate.unsupported
PRODUCT_OPTIONS = runners.compiler_options

OPTIONS: dict[str, dict[str, Any]] = {
    "nograph": {"xla_gpu_enable_command_buffer": ""},
    "pdl": {"xla_gpu_enable_pdl": True},
    "cache99": {"xla_cmd_buffer_trace_cache_size": 99},
    "skiptemp": {"xla_gpu_command_buffer_update_mode": "SKIP_TEMP"},
    "nodsf": {"xla_gpu_enable_dynamic_slice_fusion": False},
    "triton": {"xla_gpu_enable_triton_gemm": True},
}


def variant(name: str) -> None:
    """`ours`, as the engine runs it, or `xla`: without the kernels of our own for products and
    norms; then options of the compiler. `ours+nograph`: without command buffers, which keep
    kernels from starting early. `ours+apart`: positions are turned in and the cache written by two
    kernels."""
    jax.clear_caches()
    base, *options = name.split("+")
    apart = "apart" in options
    gpu_rotate.unsupported = (lambda *_: "the bench") if apart else ROTATE_UNSUPPORTED
    linear.choose = CHOOSE if base == "ours" else lambda *_: None
    linear.choose_adding = CHOOSE_ADDING if base == "ours" else lambda *_: None
    linear.choose_gated = CHOOSE_GATED if base == "ours" else lambda *_: None
    linear.adds_in_kernel = ADDS_IN_KERNEL if base == "ours" else lambda *_: False
    chosen: dict[str, Any] = {}
    for option in options:
        chosen |= {} if option == "apart" else OPTIONS[option]
    runners.compiler_options = lambda *shape: PRODUCT_OPTIONS(*shape) | chosen


@functools.partial(jax.jit, donate_argnums=1)
def fill(key: jax.Array, array: jax.Array) -> jax.Array:
    return jax.random.normal(key, array.shape, array.dtype)


def measure(
    model, mesh, leaves, batch: int, context: int, steps: int, profile: bool, tokens: int = 0
) -> dict[str, Any]:
    """A decode step of `batch` rows; with `tokens`, a prefill of that many in `batch` rows."""
    pages = PAGES
    if tokens:
        context = tokens // batch
        pages = max(pages, context // PAGE_SIZE + 1)
    shape = StepShape("mixed" if tokens else "decode", tokens or batch, batch, pages)
    runner = runners.Runner(
        model,
        mesh,
        Buckets((batch,), (tokens,), batch, pages),
        page_size=PAGE_SIZE,
        kv_dtype=jnp.dtype(jnp.bfloat16),
        attention="gpu",
    )
    needed = -(-(context + 1) // PAGE_SIZE)
    runner.num_pages = batch * needed + 1
    start = time.perf_counter()
    runner._compile_step(shape)
    runner._compile_head(batch)
    compile_s = time.perf_counter() - start
    runner.start(leaves)
    runner._kv = tuple(fill(jax.random.key(i), pages) for i, pages in enumerate(runner._kv))
    parts = step.layout(shape)
    packed = np.zeros(step.packed_size(shape), np.int32)
    packed[parts["token_ids"]] = step.TOKEN_ON_DEVICE
    if tokens:
        prompt = np.random.default_rng(1).integers(model.config.vocab_size, size=tokens)
        packed[parts["token_ids"]] = prompt
    packed[parts["query_start"]] = np.arange(batch + 1) * (context if tokens else 1)
    packed[parts["kv_lens"]] = context
    packed[parts["slots"]] = np.arange(batch)
    packed[parts["num_decode_rows"]] = 0 if tokens else batch
    table = packed[parts["page_table"]].reshape(batch, pages)
    table[:, :needed] = 1 + np.random.default_rng(0).permutation(batch * needed).reshape(batch, -1)
    argmax = jax.jit(lambda logits: jnp.argmax(logits, -1).astype(jnp.int32))

    def send():
        runner._last_token = tokens_out = argmax(runner.send(shape, packed, batch))
        tokens_out.copy_to_host_async()
        return tokens_out

    hot_sends: list[float] = []

    def run(count: int) -> None:
        last = send()
        for _ in range(count - 1):  # one step ahead, as the engine
            start = time.perf_counter()
            last, before = send(), last
            hot_sends.append(time.perf_counter() - start)
            np.asarray(before)
        np.asarray(last)

    run(5)
    kernels: dict[str, Any] = {}
    if profile:
        kernels = summary(recorded(lambda: run(10)).kernels, 10)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run(steps)
        times.append((time.perf_counter() - start) / steps)
    sends, single = [], []
    for _ in range(10):
        time.sleep(0.02)
        start = time.perf_counter()
        tokens_out = send()
        sends.append(time.perf_counter() - start)
        np.asarray(tokens_out)
        single.append(time.perf_counter() - start)
    runner.close()
    return {
        "send_ms": round(statistics.median(hot_sends) * 1e3, 3),
        "cold_send_ms": round(statistics.median(sends) * 1e3, 3),
        "single_ms": round(statistics.median(single) * 1e3, 3),
        "ms": round(statistics.median(times) * 1e3, 3),
        "min_ms": round(min(times) * 1e3, 3),
        "compile_s": round(compile_s, 1),
        **kernels,
    }


def summary(events: list[Event], steps: int) -> dict[str, Any]:
    """Microseconds a step by kernel, and idle ones."""
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
    kernels = {
        kind: [round(total / steps / 1e3, 1), round(count[kind] / steps, 1)]
        for kind, total in busy.most_common(22)
    }
    total = round(sum(busy.values()) / steps / 1e3, 1)
    return {"busy_us": total, "gap_us": round(gap / steps / 1e3, 1), "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--variants", default="ours,xla")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prefill", default="", help="such as 1x2048")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    if arguments.layers:
        config |= {"num_hidden_layers": arguments.layers}
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = registry.build(config, mesh, "tensor", jnp.bfloat16)
    params = model.random_params(0)
    leaves = [params[name] for name in model.abstract]
    jax.block_until_ready(leaves)
    figures: dict[str, Any] = {}
    for name in arguments.variants.split(","):
        variant(name)
        cases = [(f"batch {b}", int(b), 0) for b in filter(None, arguments.batches.split(","))]
        for case in filter(None, arguments.prefill.split(",")):
            rows, length = map(int, case.split("x"))
            cases.append((f"prefill {case}", rows, rows * length))
        for key, batch, tokens in cases:
            count = 5 if tokens else arguments.steps
            got = measure(
                model, mesh, leaves, batch, arguments.context, count, arguments.profile, tokens
            )
            figures.setdefault(name, {})[key] = got
            print(name, key, json.dumps(got), flush=True)
    record.store("step", jax.devices()[0].device_kind, figures)


if __name__ == "__main__":
    main()
