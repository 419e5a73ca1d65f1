"""The GPU kernel that writes keys and values, in Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.paged_attention import gpu_write, reference


@pytest.mark.parametrize("num_tokens", [2, 5, 264])
def test_each_token_goes_to_its_slot_and_nothing_else_changes(num_tokens):
    rng = np.random.default_rng(num_tokens)
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, 2, 64)), jnp.bfloat16) for _ in "kv")
    pages = jnp.asarray(rng.standard_normal((40, 8, 4, 64)), jnp.bfloat16)
    slots = jnp.asarray(rng.permutation(40 * 8)[:num_tokens], jnp.int32)
    interpret = mosaic_gpu.InterpretGPUParams()
    out = jax.jit(functools.partial(gpu_write.write_kv, interpret=interpret))(k, v, pages, slots)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32),
        np.asarray(reference.write_kv(k, v, pages, slots), np.float32),
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ((1, 8, 128, jnp.bfloat16), "one token"),
        ((64, 8, 96, jnp.bfloat16), "width 96"),
        ((64, 8, 128, jnp.float32), "float32"),
        ((64, 8, 128, jnp.bfloat16), None),
    ],
)
def test_what_the_kernel_leaves(case, reason):
    found = gpu_write.unsupported(*case)
    assert found is reason or reason in found
