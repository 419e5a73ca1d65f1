"""Which products of a decode step run in a kernel of our own, and how their work is cut."""

import functools
import math

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.decode_matmul.config import COPIED_ROWS, MIN_WEIGHT, Config

BLOCK_ROWS = 128
"""Of a thread block, at most. With more, operations cost more than bytes, and XLA's product is as
fast, but for gated ones of nearly two blocks, whose rest costs XLA kernels of their own."""
MIN_TWO_BLOCKS_ROWS, MAX_ROWS = 232, 2 * BLOCK_ROWS
MAX_ADDING_INPUTS = 8192
"""With more, the rows that each block of a product that isn't split reads cost more than a kernel
of the sum's own."""
MULTIPROCESSORS = 132
XLA_TILE = 128
"""Rows, and outputs, of a tile of XLA's products."""
MAX_SPLIT_ROWS, MAX_SPLIT_TILES = 256, 96
"""Up to which XLA splits a product itself, as its compiled steps show (JAX 0.11.2)."""

# Of up to BLOCK_ROWS rows, measured on an H200 (bench/decode_matmul.py): device kind -> shape of
# the weight -> Config.
TUNED: dict[str, dict[tuple[int, ...], Config]] = {
    "NVIDIA H200": {
        (6144, 4096): Config(96, 64, 2),
        (4096, 4096): Config(128, 64, 4),
        (14336, 2, 4096): Config(112, 64),
        (4096, 14336): Config(128, 64, 4),
    }
}


def xla_splits(device_kind: str | None, rows: int, shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """In how many shares of the inputs a device multiplies, by XLA's product, more rows than are
    `choose`'s with a weight [N, K].

    Two where its tiles leave many multiprocessors idle. XLA splits such products by itself, but
    adds up the parts in kernels of their own, 3 us each (an 8B Llama at 256 rows, H200).
    """
    outputs, inputs = shape
    if device_kind is None or not dispatch.is_hopper(device_kind) or rows <= BLOCK_ROWS:
        return 1
    if rows > MAX_SPLIT_ROWS or dtype not in (jnp.bfloat16, jnp.float16) or inputs % 128:
        return 1
    tiles = -(-rows // XLA_TILE) * -(-outputs // XLA_TILE)
    return 2 if tiles <= MAX_SPLIT_TILES else 1


@functools.cache
def choose_adding(
    device_kind: str | None, rows: int, shape: tuple[int, ...], dtype: jnp.dtype
) -> Config | None:
    """As `choose`, for `decode_matmul_add`; None where its blocks don't come close to a wave.

    What it adds must not overflow when scaled: float16 might.
    """
    outputs, inputs = shape
    if choose(device_kind, rows, shape, dtype) is None or dtype != jnp.bfloat16:
        return None
    if inputs % 128 or inputs > MAX_ADDING_INPUTS:
        return None
    for block_n in (32, 64, 96, 128):
        blocks, rest = divmod(outputs, block_n)
        # Eights: what reads the squares has them side by side, as columns of a wgmma's layout.
        if not rest and blocks % 8 == 0 and 0.9 <= blocks / MULTIPROCESSORS <= 1:
            return Config(block_n, 128)
    return None


@functools.cache
def choose(
    device_kind: str | None, rows: int, shape: tuple[int, ...], dtype: jnp.dtype
) -> Config | None:
    """How a device multiplies `rows` rows with a weight [N, K], or a gated one [N, 2, K], both of
    `dtype`; None where the product is XLA's.

    What the table doesn't have is cut so that the blocks come close to one whole wave.
    """
    outputs, inputs = shape[0], shape[-1]
    gated = len(shape) == 3
    if device_kind is None or not dispatch.is_hopper(device_kind) or rows > MAX_ROWS:
        return None
    if dtype not in (jnp.bfloat16, jnp.float16):
        return None
    if inputs % 64 or outputs * inputs < MIN_WEIGHT:
        return None
    if rows > COPIED_ROWS and rows % COPIED_ROWS:
        return None
    if rows > BLOCK_ROWS:
        return _of_two_blocks(outputs) if gated and rows >= MIN_TWO_BLOCKS_ROWS else None
    if config := TUNED.get(device_kind, {}).get(shape):
        return config
    best: tuple[float, Config] | None = None
    for block_n in range(32, 129 if gated else 257, 16):
        if outputs % block_n:
            continue
        for splits in (1,) if gated else (1, 2, 4, 8):
            blocks = outputs // block_n * splits
            if blocks <= 2 * MULTIPROCESSORS and inputs // splits >= 512:
                waves = -(-blocks // MULTIPROCESSORS)
                # a block's bytes: its weight, its rows, its parts
                halves = 2 if gated else 1
                cost = waves * (
                    (halves * block_n + max(rows, 8)) * inputs / splits * 2 + rows * block_n * 4
                )
                if best is None or cost < best[0]:
                    best = cost, Config(block_n, 64, splits)
    return best and best[1]


def _of_two_blocks(outputs: int) -> Config | None:
    """How a gated product of two blocks of rows is cut: None where multiprocessors would be idle
    for more than a tenth of the waves."""
    for block_n in range(128, 63, -16):
        waves = 2 * outputs / block_n / MULTIPROCESSORS
        if outputs % block_n == 0 and waves / math.ceil(waves) > 0.9:
            return Config(block_n, 64)
    return None
