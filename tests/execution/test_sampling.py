"""The sampler against NumPy, over random logits and edge values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution import sampling
from jaxserve.execution.buckets import SampleKind
from jaxserve.execution.step import RowOptions

V = 1003


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(7).normal(0, 3, (6, V)).astype(np.float32)


def options(rows: int, **fields) -> RowOptions:
    """The same for every row; `fields` are RowOptions'."""
    neutral = dict.fromkeys(RowOptions._fields, 0) | dict(
        num_tokens=V, target=-1, temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0
    )
    values = {name: jnp.full(rows, value) for name, value in (neutral | fields).items()}
    return RowOptions(**values)._replace(slot=jnp.arange(rows))


def sample(logits, options: RowOptions, mask, kind: SampleKind) -> sampling.Sampled:
    return sampling.sample(jnp.asarray(logits), options, mask, None, kind)[0]


def kept(array: jax.Array) -> np.ndarray:
    return np.asarray(array) > -np.inf


@pytest.mark.parametrize("k", [1, 2, 40, V - 1, V, V + 5, 0])
def test_top_k_keeps_the_k_largest(logits, k):
    result = kept(sampling.keep_top_k(jnp.asarray(logits), jnp.full(6, k, jnp.int32)))
    expected = np.zeros_like(result)
    order = np.argsort(-logits, axis=-1)[:, : k if 0 < k <= V else V]
    np.put_along_axis(expected, order, True, axis=-1)
    np.testing.assert_array_equal(result, expected)


def test_top_k_keeps_all_that_tie_with_the_last():
    row = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]])
    np.testing.assert_array_equal(
        kept(sampling.keep_top_k(row, jnp.asarray([2]))), [[False, True, True, True, False]]
    )


@pytest.mark.parametrize("p", [1e-7, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_that_reach_p(logits, p):
    result = kept(sampling.keep_top_p(jnp.asarray(logits), jnp.full(6, p, jnp.float32)))
    for row, mask in zip(logits.astype(np.float64), result, strict=True):
        probabilities = np.exp(row - row.max())
        probabilities /= probabilities.sum()
        order = np.argsort(-row)
        reached = np.cumsum(probabilities[order])
        count = V if p == 1.0 else int(np.searchsorted(reached, p)) + 1
        expected = np.zeros(V, bool)
        expected[order[:count]] = True
        np.testing.assert_array_equal(mask, expected)


def test_top_p_next_to_one_drops_only_what_rounding_may():
    row = jnp.asarray(np.linspace(0, 5, V, dtype=np.float32))[None]
    assert kept(sampling.keep_top_p(row, jnp.asarray([1 - 1e-7], jnp.float32))).sum() >= V - 1


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 1.0])
def test_min_p_drops_what_is_unlikely_beside_the_likeliest(logits, p):
    result = kept(sampling.keep_min_p(jnp.asarray(logits), jnp.full(6, p, jnp.float32)))
    ratio = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    clear = np.abs(ratio - p) > 1e-6  # at the bound itself float32 may go either way
    np.testing.assert_array_equal(result[clear], (ratio >= p)[clear])
    assert (result.sum(-1) >= 1).all()


@pytest.mark.parametrize("p", [1e-7, 0.2, 0.9, 1.0])
def test_typical_p_keeps_what_is_nearest_the_entropy(logits, p):
    result = kept(sampling.keep_typical_p(jnp.asarray(logits), jnp.full(6, p, jnp.float32)))
    for row, mask in zip(logits.astype(np.float64), result, strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(np.abs(logprobs - (np.exp(logprobs) * logprobs).sum()))
        reached = np.cumsum(np.exp(logprobs[order]))
        expected = np.zeros(V, bool)
        expected[order[: V if p == 1.0 else int(np.searchsorted(reached, p)) + 1]] = True
        np.testing.assert_array_equal(mask, expected)


def test_draw_follows_the_distribution():
    row = np.array([0.0, 1.0, -np.inf, 2.0, 0.5, -1.0] + [-np.inf] * 600 + [1.5], np.float32)
    u = np.linspace(0, 1, 20000, endpoint=False, dtype=np.float32)
    tokens = np.asarray(jax.jit(sampling.draw)(jnp.tile(row, (len(u), 1)), jnp.asarray(u)))
    counts = np.bincount(tokens, minlength=len(row)) / len(u)
    weights = np.exp(row)
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=2e-4)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_draw_never_takes_a_dropped_token(u):
    rng = np.random.default_rng(3)
    rows = np.full((64, V), -np.inf, np.float32)
    for row in rows:
        row[rng.choice(V, size=rng.integers(1, 5), replace=False)] = rng.normal()
    tokens = np.asarray(sampling.draw(jnp.asarray(rows), jnp.full(64, u, jnp.float32)))
    assert np.isfinite(rows[np.arange(64), tokens]).all()


def test_uniform_depends_on_seed_and_position_alone():
    low = jnp.asarray([1, 1, 2, 1, 1], jnp.int32)
    high = jnp.asarray([0, 0, 0, 5, 0], jnp.int32)
    position = jnp.asarray([9, 10, 9, 9, 9], jnp.int32)
    u = np.asarray(sampling.uniform(low, high, position))
    assert u[0] == u[4]
    assert len(set(u.tolist())) == 4
    alone = np.asarray(sampling.uniform(low[1:2], high[1:2], position[1:2]))
    assert alone[0] == u[1]


def test_uniform_is_spread_evenly_over_positions():
    n = 4096
    u = sampling.uniform(jnp.full(n, 42), jnp.zeros(n, jnp.int32), jnp.arange(n))
    histogram, _ = np.histogram(np.asarray(u), bins=8, range=(0, 1))
    assert abs(histogram - n / 8).max() < 5 * np.sqrt(n / 8)


@pytest.mark.parametrize("kind", [SampleKind.RANDOM, SampleKind.FILTERED, SampleKind.FULL])
def test_temperature_zero_is_argmax_in_every_kind(logits, kind):
    mask = jnp.full((6, -(-V // 32)), 0xFFFFFFFF, jnp.uint32) if kind == SampleKind.FULL else None
    result = sample(logits, options(6, temperature=0.0), mask, kind)
    np.testing.assert_array_equal(result.tokens, logits.argmax(-1))


def test_a_tiny_temperature_is_argmax_too(logits):
    result = sample(logits, options(6, temperature=1e-6), None, SampleKind.RANDOM)
    np.testing.assert_array_equal(result.tokens, logits.argmax(-1))


@pytest.mark.parametrize("kind", [SampleKind.FILTERED, SampleKind.FULL])
def test_kinds_agree_where_their_work_overlaps(logits, kind):
    given = options(6, temperature=0.8, seed_low=5, position=3)
    mask = jnp.full((6, -(-V // 32)), 0xFFFFFFFF, jnp.uint32) if kind == SampleKind.FULL else None
    plain = sample(logits, given, None, SampleKind.RANDOM)
    more = sample(logits, given, mask, kind)
    np.testing.assert_array_equal(plain.tokens, more.tokens)


def test_filters_hold_over_many_draws(logits):
    rows = jnp.tile(jnp.asarray(logits[:1]), (2000, 1))
    given = options(2000, temperature=1.5, top_k=50, top_p=0.8, min_p=0.02, seed_low=11)
    given = given._replace(position=jnp.arange(2000))
    tokens = np.asarray(sample(rows, given, None, SampleKind.FILTERED).tokens)
    scaled = logits[0].astype(np.float64) / 1.5
    order = np.argsort(-scaled)[:50]
    probabilities = np.exp(scaled[order] - scaled.max())
    count = int(np.searchsorted(np.cumsum(probabilities / probabilities.sum()), 0.8)) + 1
    allowed = order[:count][probabilities[:count] >= 0.02]
    assert set(tokens.tolist()) == set(allowed.tolist())
    shares = np.bincount(tokens, minlength=V)[allowed] / 2000
    expected = probabilities[: len(allowed)] / probabilities[: len(allowed)].sum()
    np.testing.assert_allclose(shares, expected, atol=0.05)


def test_a_masked_token_is_never_sampled_and_one_left_always_is(logits):
    bits = np.zeros((6, -(-V // 32)), np.uint32)
    only = [0, 31, 32, 500, 1001, 1002]
    for row, token in enumerate(only):
        bits[row, token // 32] = 1 << token % 32
    for temperature in (0.0, 1.0):
        given = options(6, temperature=temperature)
        result = sample(logits, given, jnp.asarray(bits), SampleKind.FULL)
        np.testing.assert_array_equal(result.tokens, only)


def test_logprobs_are_of_the_models_own_distribution(logits):
    mask = jnp.full((6, -(-V // 32)), 0xFFFFFFFF, jnp.uint32)
    given = options(6, temperature=0.3, top_k=3, seed_low=1)
    result = sample(logits, given, mask, SampleKind.FULL)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
    exact -= logits.max(-1, keepdims=True)
    tokens = np.asarray(result.tokens)
    np.testing.assert_allclose(result.logprobs[:, 0], exact[np.arange(6), tokens], atol=1e-5)
    np.testing.assert_array_equal(result.top_ids, np.argsort(-exact, -1, kind="stable")[:, :20])
    np.testing.assert_allclose(result.top_logprobs, -np.sort(-exact, -1)[:, :20], atol=1e-5)
