"""Products of few rows: the GPU kernel in Pallas's interpreter against NumPy, and how work is
cut."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from jaxserve.layers import norm
from jaxserve.layers.linear import linear, linear_in_parts
from pallas_kernels.decode_matmul.api import (
    BLOCK_ROWS,
    MAX_ROWS,
    MIN_TWO_BLOCKS_ROWS,
    MULTIPROCESSORS,
    choose,
    choose_adding,
    xla_splits,
)
from pallas_kernels.decode_matmul.gpu import Config, decode_matmul, decode_matmul_add

INTERPRET = mosaic_gpu.InterpretGPUParams()


def arrays(rows, shape, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal(s) for s in ((rows, shape[-1]), shape))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "shape", "config"),
    [
        (1, (128, 256), Config(64, 64, 2)),
        (3, (128, 320), Config(32, 64, 2)),  # shares of 2 and 3 blocks
        (70, (64, 192), Config(64, 64)),
        (130, (64, 128), Config(32, 128)),
    ],
)
def test_parts_add_up_to_the_product(rows, shape, config):
    x, weight = arrays(rows, shape)
    parts = decode_matmul(x, weight, config=config, interpret=INTERPRET)
    assert parts.shape == (config.splits, rows, shape[0])
    assert parts.dtype == jnp.float32
    expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    np.testing.assert_allclose(np.asarray(parts).sum(0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 66, 130])
def test_a_gated_product_is_silu_of_the_gate_times_up(rows):
    x, weight = arrays(rows, (64, 2, 128))
    out = decode_matmul(x, weight, config=Config(32, 64), gated=True, interpret=INTERPRET)
    gate, up = (np.asarray(x, np.float32) @ np.asarray(weight, np.float32)[:, i].T for i in (0, 1))
    expected = gate / (1 + np.exp(-gate)) * up
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=0.05)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("gated", [False, True])
def test_two_products_do_the_sum_and_the_norm_between_them(rows, gated):
    x, weight = arrays(rows, (64, 128))
    hidden, next_weight = arrays(rows, (32, 2, 64) if gated else (32, 64), seed=1)
    rng = np.random.default_rng(2)
    scale = jnp.asarray(rng.uniform(0.5, 2, 64), jnp.bfloat16)
    adds = Config(32, 128)
    total, scaled, squares = decode_matmul_add(
        x, weight, hidden, scale, config=adds, interpret=INTERPRET
    )
    wide = [np.asarray(a, np.float32) for a in (x, weight, hidden, scale, next_weight)]
    expected = wide[0] @ wide[1].T + wide[2]
    np.testing.assert_allclose(np.asarray(total, np.float32), expected, rtol=1e-2, atol=0.05)
    kept = np.asarray(total, np.float32)
    np.testing.assert_allclose(squares[:rows].sum(1), (kept**2).sum(1), rtol=1e-5)
    normed = kept / np.sqrt((kept**2).mean(1, keepdims=True) + 0.1) * wide[3]
    half = norm.HalfNormed(scaled, squares, 0.1)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half.whole(), np.float32), normed, rtol=2e-2, atol=0.01)
    out = decode_matmul(
        scaled, next_weight, squares, config=Config(32, 64), gated=gated, eps=0.1,
        interpret=INTERPRET,
    )  # fmt: skip
    if gated:
        gate, up = (normed @ wide[4][:, i].T for i in (0, 1))
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        expected, out = normed @ wide[4].T, out.sum(0)
    error = np.abs(np.asarray(out, np.float32) - expected)
    assert error.max() <= 0.01 * np.abs(expected).max()


SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (14336, 2, 4096),
    (4096, 14336),
    (5120, 8192),
    (8960, 2, 2048),
]


@pytest.mark.parametrize("rows", [1, 48, BLOCK_ROWS])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_cut_into_blocks_that_fit(shape, rows):
    config = choose("NVIDIA H200", rows, shape, jnp.dtype(jnp.bfloat16))
    assert config is not None
    assert shape[0] % config.block_n == 0
    assert shape[-1] % (config.block_k * config.splits) == 0
    assert shape[0] // config.block_n * config.splits <= 2 * MULTIPROCESSORS
    assert config.num_stages(64 if rows <= 64 else 128, len(shape) - 1) >= 3


@pytest.mark.parametrize(
    ("rows", "shape", "config"),
    [
        (MAX_ROWS, (14336, 2, 4096), Config(112, 64)),
        (MIN_TWO_BLOCKS_ROWS, (12288, 2, 4096), Config(96, 64)),
        (MIN_TWO_BLOCKS_ROWS - 1, (14336, 2, 4096), None),
        (MAX_ROWS + 1, (14336, 2, 4096), None),
        (MAX_ROWS, (17408, 2, 5120), None),  # 272 blocks of 128 or 544 of 64: idle in the last wave
        (MAX_ROWS, (6144, 4096), None),
    ],
)
def test_two_blocks_of_rows_where_they_fill_whole_waves(rows, shape, config):
    assert choose("NVIDIA H200", rows, shape, jnp.dtype(jnp.bfloat16)) == config


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "block_n"),
    [
        (1, (4096, 4096), "bfloat16", 32),
        (BLOCK_ROWS, (8192, 8192), "bfloat16", 64),
        (BLOCK_ROWS + 1, (4096, 4096), "bfloat16", None),
        (1, (4096, 14336), "bfloat16", None),  # its blocks would read too much of the rows
        (1, (5120, 5120), "bfloat16", None),  # 80 blocks of 64
        (1, (4224, 4096), "bfloat16", None),  # 132 of 32, whose squares aren't eights
        (1, (4096, 4096), "float16", None),
    ],
)
def test_products_that_add_fill_a_wave(rows, shape, dtype, block_n):
    config = choose_adding("NVIDIA H200", rows, shape, jnp.dtype(dtype))
    assert config == (block_n and Config(block_n, 128))


@pytest.mark.parametrize(
    ("device", "rows", "shape", "dtype"),
    [
        ("cpu", 1, (4096, 4096), "bfloat16"),
        (None, 1, (4096, 4096), "bfloat16"),
        ("NVIDIA A100-SXM4-80GB", 1, (4096, 4096), "bfloat16"),
        ("NVIDIA H200", BLOCK_ROWS + 1, (4096, 4096), "bfloat16"),
        ("NVIDIA H200", 1, (128256, 4096), "bfloat16"),
        ("NVIDIA H200", 1, (576, 576), "bfloat16"),
        ("NVIDIA H200", 1, (4096, 4128), "bfloat16"),
        ("NVIDIA H200", 9, (4096, 4096), "bfloat16"),  # a whole copy of 8, and a part of one
        ("NVIDIA H200", 250, (14336, 2, 4096), "bfloat16"),
        ("NVIDIA H200", 1, (4096, 4096), "float32"),
    ],
)
def test_what_is_left_to_xla(device, rows, shape, dtype):
    assert choose(device, rows, shape, jnp.dtype(dtype)) is None


@pytest.mark.parametrize(
    ("device", "rows", "shape", "dtype", "splits"),
    [
        ("NVIDIA H200", 256, (6144, 4096), "bfloat16", 2),
        ("NVIDIA H200", BLOCK_ROWS + 1, (4096, 14336), "float16", 2),
        ("NVIDIA H200", BLOCK_ROWS, (4096, 4096), "bfloat16", 1),
        ("NVIDIA H200", 256, (6272, 4096), "bfloat16", 1),  # tiles for 98 multiprocessors
        ("NVIDIA H200", 384, (4096, 4096), "bfloat16", 1),
        ("NVIDIA H200", 256, (4096, 4160), "bfloat16", 1),
        ("NVIDIA H200", 256, (4096, 4096), "float32", 1),
        ("NVIDIA A100-SXM4-80GB", 256, (4096, 4096), "bfloat16", 1),
        ("cpu", 256, (4096, 4096), "bfloat16", 1),
        (None, 256, (4096, 4096), "bfloat16", 1),
    ],
)
def test_xla_splits_inputs_where_its_tiles_leave_multiprocessors_idle(
    device, rows, shape, dtype, splits
):
    assert xla_splits(device, rows, shape, jnp.dtype(dtype)) == splits


def test_parts_of_xla_add_up_to_the_product():
    x, weight = arrays(BLOCK_ROWS + 2, (2, 3, 256))
    placement: Any = types.SimpleNamespace(device_kind="NVIDIA H200", on_cpu=False)
    parts = linear_in_parts(x, weight, placement)
    assert parts.shape == (2, BLOCK_ROWS + 2, 2, 3)
    assert parts.dtype == jnp.float32
    wide, matrix = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    expected = np.einsum("TI,ABI->TAB", wide, matrix)
    np.testing.assert_allclose(np.asarray(parts).sum(0), expected, rtol=1e-4, atol=1e-4)
    half = np.einsum("TI,ABI->TAB", wide[:, :128], matrix[:, :, :128])
    np.testing.assert_allclose(parts[0], half, rtol=1e-4, atol=1e-4)
    whole = linear(x, weight, placement)
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(whole, np.float32), expected, rtol=1e-2, atol=0.05)
    assert linear(x, weight.astype(jnp.float32), placement).dtype == jnp.float32  # as elsewhere


def test_the_layers_take_parts_for_the_sum_they_are():
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((4, 96)), jnp.float32)
    parts = jnp.asarray(rng.standard_normal((3, 4, 96)), jnp.float32)
    layer = norm.RMSNorm(96, "embed", 1e-5, jnp.float32)
    stream, x = layer.of_sum(norm.Residual(hidden, parts))
    expected = np.asarray(hidden) + np.asarray(parts).sum(0)
    np.testing.assert_allclose(stream.sum(), expected, rtol=1e-6)
    np.testing.assert_allclose(
        x, expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5), rtol=1e-5
    )
