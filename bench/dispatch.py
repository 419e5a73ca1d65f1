"""What sending a step costs the host: the call of its program, beside a call with the same arrays
that computes nothing; what is left is starting the step's kernels.

Each call is made while the device has nothing to do, and timed until it returns, which is before
the device is done. What the host does around the calls is bench.host's.

Run: python -m bench.dispatch MODEL [--load-format dummy], or --tiny-layers 32 in place of a model
"""

import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import engines, record
from jaxserve import messages
from jaxserve.engine.start import start
from jaxserve.execution import step
from jaxserve.execution.buckets import SampleKind, SampleShape, StepShape
from jaxserve.execution.runner import Runner

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


class Silent(messages.QueueEngineEnd):
    """A link that nobody listens to."""

    def send(self, message: messages.FromEngine) -> None:
        pass


def call_s(call: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for index in range(repeats + 3):  # the first calls set themselves up
        began = time.perf_counter()
        result = call()
        if index >= 3:
            seconds.append(time.perf_counter() - began)
        jax.block_until_ready(result)
    return seconds


def measure(runner: Runner, shape: StepShape, repeats: int) -> dict[str, Any]:
    """Sends a step of padding only, which writes nothing but page 0."""
    packed = np.zeros(step.packed_size(shape), np.int32)
    rows = runner.buckets.num_logits(shape.seqs)
    options = np.zeros((len(step.RowOptions._fields), rows), np.int32)
    sample = runner._samples[SampleShape(SampleKind.GREEDY, rows)]
    keep = jax.jit(
        lambda leaves, kv, last, packed: (packed, kv), donate_argnums=1, keep_unused=True
    )
    nothing = keep.lower(runner._leaves, runner._kv, runner._last_token, packed).compile()
    logits = jnp.zeros((rows, runner.model.config.vocab_size), jnp.float32)

    def send(program):
        out, runner._kv, *_ = program(runner._leaves, runner._kv, runner._last_token, packed)
        return out, runner._kv

    def send_sampling():
        nonlocal logits
        before = logits
        logits = jnp.zeros_like(before)
        _, runner._last_token, _ = sample(before, runner._last_token, options, None, None)
        return runner._last_token, logits

    return {
        "arrays": len(runner._leaves) + len(runner._kv) + 2,
        "step": record.spread(call_s(lambda: send(runner._steps[shape]), repeats)),
        "the same arrays, nothing computed": record.spread(call_s(lambda: send(nothing), repeats)),
        "greedy sampling, and one small call": record.spread(call_s(send_sampling, repeats)),
    }


def main() -> None:
    parser = engines.engine_parser(__doc__)
    parser.add_argument("--tiny-layers", type=int, help="a tiny model of so many layers")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    tiny_layers, repeats = arguments.tiny_layers, arguments.repeats
    config = engines.engine_config(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if tiny_layers is not None:
            text = json.dumps({**TINY, "num_hidden_layers": tiny_layers})
            (pathlib.Path(folder) / "config.json").write_text(text)
            config = dataclasses.replace(config, model=folder, load_format="dummy")
        runner = start(config, Silent())._runner
    shapes = sorted(runner.buckets.steps())
    by_kind = [[s for s in shapes if s.kind == kind] for kind in ("decode", "mixed")]
    chosen = sorted({s for found in by_kind for s in (found[0], found[-1])})
    figures = {str(shape): measure(runner, shape, repeats) for shape in chosen}
    device = jax.devices()[0]
    name = record.cpu_name() if device.platform == "cpu" else device.device_kind
    record.store("dispatch", name, figures)


if __name__ == "__main__":
    main()
