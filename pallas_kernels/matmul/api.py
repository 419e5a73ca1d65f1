"""Which products of many rows run in a kernel of our own, and how their work is cut."""

import functools
import math

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.decode_matmul.config import COPIED_ROWS, MIN_WEIGHT
from pallas_kernels.matmul.config import BLOCK_ROWS, CLUSTER, CLUSTERS, Config

MIN_USED = 0.85
"""Of the multiplications of all rounds, how many must be of rows that there are."""


@functools.cache
def choose_gated(
    device_kind: str | None, rows: int, shape: tuple[int, ...], dtype: jnp.dtype
) -> Config | None:
    """How a device multiplies `rows` rows, more than `decode_matmul` takes, with a gated weight
    [N, 2, K], both of `dtype`; None where the product is XLA's.

    Cut so that little is multiplied in vain in the last round, or past the last row.
    """
    outputs, _, inputs = shape
    if device_kind is None or not dispatch.is_hopper(device_kind) or rows % COPIED_ROWS:
        return None
    if dtype not in (jnp.bfloat16, jnp.float16) or inputs % Config.block_k:
        return None
    if outputs * inputs < MIN_WEIGHT:
        return None
    best, most = None, MIN_USED
    for block_n in (128, 112, 96):
        blocks = math.ceil(rows / (CLUSTER * BLOCK_ROWS))
        rounds = math.ceil(blocks * (outputs // block_n) / CLUSTERS)
        used = rows * outputs / (rounds * CLUSTERS * CLUSTER * BLOCK_ROWS * block_n)
        if outputs % block_n == 0 and used > most:
            best, most = Config(block_n), used
    return best
