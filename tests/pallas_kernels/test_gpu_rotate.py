"""The GPU kernel that turns queries and keys and writes to the cache, in Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.paged_attention import gpu_rotate
from pallas_kernels.paged_attention.api import rotate_and_write

PAGES, PAGE_SIZE = 12, 8


@pytest.mark.parametrize(
    ("num_parts", "num_tokens", "group", "head_dim", "dtype"),
    [
        (2, 1, 4, 128, jnp.float32),
        (4, 5, 2, 128, jnp.float32),
        (1, 9, 8, 128, jnp.bfloat16),
        (1, 3, 1, 256, jnp.float16),
    ],
)
def test_turns_and_writes_as_numpy_does(num_parts, num_tokens, group, head_dim, dtype):
    rng = np.random.default_rng(num_tokens)
    cache = jnp.bfloat16 if dtype == jnp.float32 else dtype
    shape = (num_parts, num_tokens, 2, group + 2, head_dim)
    qkv = jnp.asarray(rng.standard_normal(shape), dtype)
    angles = rng.uniform(0, 100, (num_tokens, head_dim // 2)).astype(np.float32)
    pages = jnp.asarray(rng.standard_normal((PAGES, PAGE_SIZE, 4, head_dim)), cache)
    slots = rng.permutation(PAGES * PAGE_SIZE)[:num_tokens].astype(np.int32)
    interpret = mosaic_gpu.InterpretGPUParams()
    rotate = jax.jit(functools.partial(gpu_rotate.rotate_and_write, interpret=interpret))
    q, written = rotate(qkv, np.cos(angles), np.sin(angles), pages, slots)

    x = np.asarray(jnp.sum(qkv.astype(jnp.float32), 0).astype(cache).astype(jnp.float32))
    pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
    pairs = pairs * np.exp(1j * angles)[:, None, None]
    turned = np.concatenate((pairs.real, pairs.imag), axis=-1)
    np.testing.assert_allclose(
        np.asarray(q, np.float32),
        turned[:, :, :group].reshape(num_tokens, -1, head_dim),
        rtol=1e-2,
        atol=1e-2,
    )
    expected = np.array(pages, np.float32).reshape(-1, 2, 2, head_dim)
    expected[slots, :, 0] = turned[:, :, group]
    expected[slots, :, 1] = x[:, :, group + 1]
    got = np.asarray(written, np.float32).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(got[slots, :, 1], expected[slots, :, 1])  # values: not turned
    others = np.setdiff1d(np.arange(len(got)), slots)
    np.testing.assert_array_equal(got[others], expected[others])


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "reason"),
    [
        (3, 64, jnp.bfloat16, "3 heads of width 64"),
        (7, 128, jnp.bfloat16, "7 heads of width 128"),
        (4, 128, jnp.float32, "float32"),
        (4, 128, jnp.bfloat16, None),
    ],
)
def test_what_the_kernel_leaves(group, head_dim, dtype, reason):
    found = gpu_rotate.unsupported((2, 64, 8, group + 2, head_dim), dtype)
    assert found is reason or reason in found


@pytest.mark.parametrize("impl", ["reference", "tpu"])
def test_other_implementations_leave_it_to_xla(impl):
    empty = np.zeros((1, 1, 1, 6, 128), np.float32)
    call = functools.partial(rotate_and_write, kind="decode", sliding_window=None, impl=impl)
    assert call(empty, None, None, None, None) is None
