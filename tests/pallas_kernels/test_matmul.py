"""Products of many rows: the GPU kernel in Pallas's interpreter against NumPy, and how work is
cut."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from jaxserve.layers.linear import gated_linear
from pallas_kernels.matmul import gpu
from pallas_kernels.matmul.api import choose_gated
from pallas_kernels.matmul.gpu import Config, gated_matmul

INTERPRET = mosaic_gpu.InterpretGPUParams()
LLAMA_8B = (14336, 2, 4096)


def arrays(rows, shape, dtype):
    rng = np.random.default_rng(rows)
    x, weight = (rng.standard_normal(s) for s in ((rows, shape[-1]), shape))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize(
    ("rows", "config", "clusters", "dtype"),
    [
        (8, Config(32, 64, 3), 2, "bfloat16"),
        (264, Config(32, 64, 3, strip=2), 4, "bfloat16"),  # 9 tiles, two strips of rows
        (520, Config(48, 128, 2), 3, "float16"),
        (384, Config(96), 66, "bfloat16"),
    ],
)
def test_a_gated_product_is_silu_of_the_gate_times_up(rows, config, clusters, dtype, monkeypatch):
    monkeypatch.setattr(gpu, "CLUSTERS", clusters)
    x, weight = arrays(rows, (96, 2, 256), dtype)
    out = gated_matmul(x, weight, config=config, interpret=INTERPRET)
    gate, up = (np.asarray(x, np.float32) @ np.asarray(weight, np.float32)[:, i].T for i in (0, 1))
    expected = gate / (1 + np.exp(-gate)) * up
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=0.05)


@pytest.mark.parametrize(
    ("rows", "shape", "block_n"),
    [
        (4096, LLAMA_8B, 128),
        (2048, LLAMA_8B, 128),
        (1536, LLAMA_8B, 112),  # 768 tiles are nearly 12 rounds, 672 of 128 hardly more than 10
        (512, LLAMA_8B, 112),
        (480, LLAMA_8B, 112),
        (448, LLAMA_8B, None),  # an eighth would be past the last row, and some of the last round
        (264, LLAMA_8B, None),
        (8, LLAMA_8B, None),
        (512, (8960, 2, 2048), None),  # 140 tiles: two rounds and an eighth
        (4096, (8960, 2, 2048), 128),
        (4096, (11008, 2, 4096), 128),
        (2048, (9728, 2, 2560), 128),
        (2048, (5504, 2, 2048), 128),
    ],
)
def test_a_gated_product_is_cut_so_that_little_is_in_vain(rows, shape, block_n):
    config = choose_gated("NVIDIA H200", rows, shape, jnp.dtype(jnp.bfloat16))
    assert config == (block_n and Config(block_n))


@pytest.mark.parametrize(
    ("device", "rows", "shape", "dtype"),
    [
        ("cpu", 4096, LLAMA_8B, "bfloat16"),
        (None, 4096, LLAMA_8B, "bfloat16"),
        ("NVIDIA A100-SXM4-80GB", 4096, LLAMA_8B, "bfloat16"),
        ("NVIDIA H200", 4096, LLAMA_8B, "float32"),
        ("NVIDIA H200", 4095, LLAMA_8B, "bfloat16"),  # a copy of 8 rows, and a part of one
        ("NVIDIA H200", 4096, (14336, 2, 4128), "bfloat16"),
        ("NVIDIA H200", 4096, (14344, 2, 4096), "bfloat16"),  # no block's multiple
        ("NVIDIA H200", 4096, (1536, 2, 576), "bfloat16"),
    ],
)
def test_what_is_left_to_xla(device, rows, shape, dtype):
    assert choose_gated(device, rows, shape, jnp.dtype(dtype)) is None


def test_the_layer_takes_the_kernel_where_it_is_chosen(monkeypatch):
    placement: Any = types.SimpleNamespace(
        device_kind="NVIDIA H200", on_cpu=False, constrain=lambda x, axes: x
    )
    calls = []
    monkeypatch.setattr(gpu, "gated_matmul", lambda x, w, config: calls.append(config))
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct(LLAMA_8B, jnp.bfloat16)
    bias = jax.ShapeDtypeStruct(LLAMA_8B[:2], jnp.bfloat16)
    jax.eval_shape(lambda *arrays: gated_linear(*arrays, placement), x, weight)
    assert calls == [Config(128)]
    for given in (x, weight), (x, weight, bias), (x.update(dtype=jnp.float32), weight):
        jax.eval_shape(lambda x, w, b=None: gated_linear(x, w, placement, bias=b), *given)
    assert calls == [Config(128)] * 2
