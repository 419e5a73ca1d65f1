"""Prefill in chunks, then decode, through the paged reference, against one full forward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jax
import tiny_models

from pallas_kernels.paged_attention.api import AttentionMeta, paged_attention

PAGE_SIZE = 8
# Pages of the sequence, out of order; page 0 takes the writes of padding.
PAGES = (5, 2, 9, 1, 7)
NUM_PAGES = 11


def serve(name, chunks, tensor=1):
    """f32[T, V]: logits of every token, in steps of `chunks` tokens over unused (NaN) pages."""
    built, leaves = tiny_jax.build(name, tensor)
    config = built.config
    shape = (NUM_PAGES, PAGE_SIZE, 2 * built.kv_heads, config.head_dim)
    sharding = built.placement.sharding((None, None, "kv_heads", None))
    kv = tuple(jnp.full(shape, jnp.nan, device=sharding) for _ in range(config.num_layers))

    @functools.partial(jax.jit, static_argnames="kind")
    def step(leaves, kv, token_ids, positions, meta, kind):
        model = built.merge(leaves)

        def attend(q, k, v, pages, *, sliding_window, sm_scale):
            return paged_attention(
                *(q, k, v, pages, meta),
                sm_scale=sm_scale,
                kind=kind,
                sliding_window=sliding_window,
                mesh=built.placement.mesh,
            )

        hidden, kv = model.forward(token_ids, positions, kv, attend)
        return model.logits(hidden), kv

    token_ids, found, start = tiny_models.token_ids(tiny_models.CONFIGS[name]), [], 0
    for size in chunks:
        positions = np.arange(start, start + size)
        meta = AttentionMeta(
            page_table=jnp.array([PAGES], jnp.int32),
            kv_lens=jnp.array([start + size], jnp.int32),
            query_start=jnp.array([0, size], jnp.int32),
            slot_mapping=jnp.asarray(
                np.array(PAGES)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
                jnp.int32,
            ),
            num_decode_rows=jnp.array(int(size == 1), jnp.int32),
        )
        chunk = jnp.asarray(token_ids[start : start + size])
        kind = "decode" if size == 1 else "mixed"
        logits, kv = step(leaves, kv, chunk, jnp.asarray(positions, jnp.int32), meta, kind=kind)
        found.append(np.asarray(logits))
        start += size
    assert start == len(token_ids) <= math.prod((len(PAGES), PAGE_SIZE))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("llama3", 1), ("mistral", 1), ("qwen3-bias-window", 1), ("mistral", 2), ("qwen3", 8)],
)
def test_chunked_prefill_and_decode_equal_one_forward(name, tensor):
    served, whole = serve(name, (11, 11, 11, 1, 1, 1, 1, 1, 1, 1), tensor), tiny_jax.logits(name)
    np.testing.assert_allclose(served, whole, rtol=0, atol=2e-5)  # float32 sums in another order
    np.testing.assert_array_equal(served.argmax(-1), whole.argmax(-1))
