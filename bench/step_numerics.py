"""Whether whole steps that run in kernels of our own give what XLA's kernels give, and the same
each time: steps are sent one after the other without waiting, as kernels start before the ones
ahead have ended (see `pallas_kernels.early_launch`).

Run: python -m bench.step_numerics MODEL_FOLDER [--batches 1,8,64,128,256] [--prefill 1x2048]
Random weights and a random cache. Exits with 1 where logits differ from one call to the next, or
from the reference's by more than 16-bit rounding makes of it.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.step import PAGE_SIZE, variant
from jaxserve.config import MeshConfig
from jaxserve.execution import step
from jaxserve.execution.buckets import Buckets, StepShape
from jaxserve.execution.runner import Runner
from jaxserve.models import registry
from pallas_kernels.dispatch import is_hopper
from pallas_kernels.paged_attention.api import Implementation
from sharding.mesh import make_mesh

CALLS = 30
TOLERANCE = 0.1
"""Largest difference over the spread of the reference's logits."""


def logits(
    model: registry.BuiltModel,
    mesh: jax.sharding.Mesh,
    leaves: list[jax.Array],
    shape: StepShape,
    context: int,
    attention: Implementation,
    calls: int,
) -> tuple[np.ndarray, int]:
    """Those of the first of some equal calls; how many calls' are others."""
    runner = Runner(
        model,
        mesh,
        Buckets((shape.seqs,), (shape.tokens,), shape.seqs, shape.pages),
        page_size=PAGE_SIZE,
        kv_dtype=jnp.dtype(jnp.bfloat16),
        attention=attention,
    )
    runner.num_pages = shape.seqs * shape.pages + 1
    runner._compile_step(shape)
    runner._compile_head(shape.seqs)
    runner.start(leaves)
    keys = jax.random.split(jax.random.key(1), len(runner._kv))
    runner._kv = tuple(
        jax.random.normal(key, pages.shape, pages.dtype)
        for key, pages in zip(keys, runner._kv, strict=True)
    )
    random = np.random.default_rng(0)
    parts = step.layout(shape)
    packed = np.zeros(step.packed_size(shape), np.int32)
    per_row = shape.tokens // shape.seqs
    packed[parts["token_ids"]] = random.integers(0, model.config.vocab_size, shape.tokens)
    packed[parts["query_start"]] = np.arange(shape.seqs + 1) * per_row
    lens = random.integers(context // 2, context + 1, shape.seqs)
    packed[parts["kv_lens"]] = lens if shape.kind == "decode" else per_row
    packed[parts["slots"]] = np.arange(shape.seqs)
    packed[parts["num_decode_rows"]] = shape.seqs if shape.kind == "decode" else 0
    pages = 1 + random.permutation(shape.seqs * shape.pages)
    packed[parts["page_table"]] = pages
    found = []
    for _ in range(calls):
        found.append(runner.send(shape, packed, shape.seqs))
    first = np.asarray(found[0])
    others = sum(not np.array_equal(first, np.asarray(out)) for out in found[1:])
    runner.close()
    return first, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--batches", default="1,8,64,128,256")
    parser.add_argument("--prefill", default="1x2048")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--variant", default="ours", help="see bench.step")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    config |= {"num_hidden_layers": min(arguments.layers, config["num_hidden_layers"])}
    device = jax.devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    model = registry.build(config, mesh, "tensor", jnp.bfloat16)
    params = model.random_params(0)
    leaves = [params[name] for name in model.abstract]
    ours: Implementation = "gpu" if is_hopper(device.device_kind) else "reference"
    pages = arguments.context // PAGE_SIZE + 1
    shapes = [
        StepShape("decode", batch, batch, pages)
        for batch in map(int, filter(None, arguments.batches.split(",")))
    ]
    for case in filter(None, arguments.prefill.split(",")):
        rows, length = map(int, case.split("x"))
        shapes.append(StepShape("mixed", rows * length, rows, length // PAGE_SIZE + 1))
    found: dict[str, Any] = {}
    for shape in shapes:
        inputs = (model, mesh, leaves, shape, arguments.context)
        variant("xla")
        expected, _ = logits(*inputs, "reference", 1)
        variant(arguments.variant)
        got, others = logits(*inputs, ours, arguments.calls)
        found[str(shape)] = {
            "calls": arguments.calls,
            "other_each_time": others,
            "difference": round(float(np.abs(got - expected).max() / expected.std()), 4),
            "same_token": round(float((got.argmax(-1) == expected.argmax(-1)).mean()), 3),
        }
        print(shape, json.dumps(found[str(shape)]), flush=True)
    record.store("step_numerics", device.device_kind, found)
    wrong = [
        name
        for name, figures in found.items()
        if figures["other_each_time"] or not figures["difference"] < TOLERANCE
    ]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
