"""Residual addition with RMSNorm: the GPU kernel in Pallas's interpreter against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.add_norm.gpu import add_norm, unsupported


@pytest.mark.parametrize(("rows", "parts", "width"), [(1, 1, 512), (3, 4, 1024)])
def test_sum_and_norm(rows, parts, width):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    addend = jnp.asarray(rng.standard_normal((parts, rows, width)), jnp.float32)
    scale = jnp.asarray(rng.standard_normal(width), jnp.bfloat16)
    total, normed = add_norm(
        hidden, addend, scale, eps=1e-5, interpret=mosaic_gpu.InterpretGPUParams()
    )
    expected = (np.asarray(hidden, np.float32) + np.asarray(addend).sum(0)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(total), expected)
    wide = expected.astype(np.float32)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float32)
    np.testing.assert_allclose(np.asarray(normed, np.float32), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [576, 256, 16384])
def test_what_the_kernel_leaves(width):
    assert str(width) in str(unsupported(width))
