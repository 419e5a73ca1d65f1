"""Small laws of the layers, against plain numpy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers import rope
from jaxserve.layers.embedding import embed
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import RMSNorm
from sharding.mesh import make_mesh
from sharding.place import Placement


@pytest.fixture
def placement():
    return Placement(make_mesh(SimpleNamespace(data=1, expert=1, tensor=1)))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    freqs = rope.frequencies(16, 10000.0)
    x, y = np.random.default_rng(0).normal(size=(2, 1, 3, 16)).astype(np.float32)

    def turned(value, position):
        return np.asarray(
            rope.rotate(jnp.asarray(value), *rope.rope_tables(jnp.array([position]), freqs))
        )

    np.testing.assert_allclose(
        np.linalg.norm(turned(x, 77), axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
    )
    near = (turned(x, 5) * turned(y, 2)).sum(-1)
    far = (turned(x, 105) * turned(y, 102)).sum(-1)
    np.testing.assert_allclose(near, far, atol=1e-4)
    np.testing.assert_array_equal(turned(x, 0), x)


def test_llama3_stretch_keeps_short_waves_and_divides_long_ones():
    freqs = rope.frequencies(128, 500000.0)
    stretched = rope.stretch_llama3(
        freqs, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    waves = 8192 * freqs / (2 * np.pi)
    np.testing.assert_array_equal(stretched[waves > 4], freqs[waves > 4])
    np.testing.assert_allclose(stretched[waves < 1], freqs[waves < 1] / 8)
    assert np.all(np.diff(stretched) < 0)


def test_rms_norm_in_bfloat16_computes_in_float32():
    norm = RMSNorm(512, "embed", 1e-6, jnp.bfloat16)
    x = jnp.full(
        (2, 512), 3e4, jnp.bfloat16
    )  # squares overflow what float16 holds, sums lose bits in bfloat16
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(norm(x), np.float32), 1.0, rtol=1e-2)


# The two sides of the row count at which the product is written the other way around.
@pytest.mark.parametrize("rows", [1, 128, 129])
def test_linear_is_the_product_at_any_number_of_rows(placement, rows):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 24)).astype(np.float32)
    weight = rng.normal(size=(3, 2, 5, 24)).astype(np.float32)
    product = jax.jit(lambda x, w: linear(x, w, placement))(x, weight)
    np.testing.assert_allclose(product, np.einsum("td,kghd->tkgh", x, weight), atol=1e-5)


def test_embed_clamps_ids_outside_the_table():
    table = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(embed(jnp.array([2, 0, 7]), table), [[4, 5], [0, 1], [4, 5]])
