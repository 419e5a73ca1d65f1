"""Rotary position embedding (arXiv:2104.09864): dimension i turns together with i + H/2."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Radians per position of each pair of dimensions, float64[H/2]."""
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def stretch_llama3(
    freqs: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> np.ndarray:
    """Llama 3.1's stretch: long waves divided by `factor`, short ones kept, a ramp between.

    A wave is long when the original context holds fewer than `low_freq_factor` of it, short over
    `high_freq_factor`. Source: github.com/meta-llama/llama-models,
    models/llama3/reference_impl/model.py, apply_scaling.
    """
    waves = original_context * freqs / (2 * math.pi)
    kept = np.clip((waves - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return freqs * (kept + (1.0 - kept) / factor)


def rope_tables(
    positions: Int[Array, " T"], freqs: np.ndarray
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines for a step's tokens, float32: made once, used by every layer."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(freqs, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T *heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T *heads H"]:
    """Turns each head of each token by its position; in float32 inside."""
    # Without the barrier XLA computes them again in every layer, for each head.
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    heads = range(1, x.ndim - 1)
    cos, sin = jnp.expand_dims(cos, tuple(heads)), jnp.expand_dims(sin, tuple(heads))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)
