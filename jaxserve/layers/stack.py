"""The loop over layers: the one place that decides how a model's layers follow each other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx


def run_layers[Layer: nnx.Module, Stream](
    layers: Iterable[Layer],
    stream: Stream,
    kv: Sequence[jax.Array],
    kinds: Sequence[Any],
    step: Callable[[Layer, Stream, jax.Array, Any], tuple[Stream, jax.Array]],
) -> tuple[Stream, tuple[jax.Array, ...]]:
    """Runs step(layer, stream, kv pages, kind) -> (stream, kv pages) through the layers.

    Unrolled, because a scan copies each layer's weights out of the stack: a third of the memory
    rate (H200, JAX 0.11.2). Layers of one kind share one trace, which is most of what an unrolled
    model costs to lower.
    """
    call = jax.jit(step, static_argnums=3)
    written = []
    for index, (layer, pages, kind) in enumerate(zip(layers, kv, kinds, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            stream, pages = call(layer, stream, pages, kind)
        written.append(pages)
    return stream, tuple(written)
