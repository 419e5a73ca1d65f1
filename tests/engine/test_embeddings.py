"""Embeddings against one full forward, in chunks, from the cache, preempted, among other work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jax
import tiny_models
from engines import TINY, make

from jaxserve import messages
from jaxserve.types import Request, TokenSampling

# float32 sums in another order; states are of size 1
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"), embeddings=True)


@pytest.fixture(scope="module")
def states():
    """f32[T, D]: hidden states after the last norm of a whole sequence."""
    built = tiny_jax.registry.build(TINY, tiny_jax.mesh(1), "tensor", np.float32)
    leaves = tiny_jax.apply_rules(built, tiny_models.tensors(TINY))

    @jax.jit
    def run(leaves, token_ids):
        model = built.merge(leaves)
        none = (jnp.zeros(()),) * built.config.num_layers
        hidden, _ = model.forward(
            token_ids, jnp.arange(len(token_ids)), none, tiny_jax.dense_attend
        )
        return model.states(hidden)

    def of(token_ids):
        padded = np.zeros(128, np.int32)  # what comes later changes nothing before
        padded[: len(token_ids)] = token_ids
        return np.asarray(run(leaves, padded))[: len(token_ids)]

    return of


def submit(driver, name, token_ids, pooling):
    sampling = TokenSampling(max_tokens=1, temperature=0.0)
    request = Request(request_id=name, token_ids=token_ids, sampling=sampling, pooling=pooling)
    driver.engine._handle(messages.Submit(request))


def embeddings(driver):
    while driver.scheduler.has_work or driver.engine._pending is not None:
        driver.step()
    driver.step()
    return {
        output.request_id: np.frombuffer(output.embedding, np.float32)
        for output in driver.outputs()
        if output.embedding is not None
    }


def expected(states, token_ids, pooling):
    found = states(token_ids).astype(np.float64)
    return found[-1] if pooling == "last" else found.mean(axis=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("length", [1, 2, 8, 31, 32, 33, 100])
def test_equal_one_forward_whatever_the_chunks(driver, states, pooling, length):
    rng = np.random.default_rng(length)
    token_ids = rng.integers(3, 100, length).tolist()
    for attempt in range(2):  # the second time its prefix is cached
        submit(driver, f"e{attempt}", token_ids, pooling)
        [vector] = embeddings(driver).values()
        np.testing.assert_allclose(
            vector, expected(states, token_ids, pooling), rtol=0, atol=TOLERANCE
        )


def test_among_requests_that_generate(driver, states):
    rng = np.random.default_rng(5)
    [alone] = driver.generate([[9, 8, 7]], max_tokens=20)
    prompts = [rng.integers(3, 100, size).tolist() for size in (1, 5, 40, 70, 90, 3)]
    driver.submit([9, 8, 7], request_id="text", max_tokens=20)
    before = driver.engine.stats().num_runtime_compiles  # by the full forward of other tests
    for i, prompt in enumerate(prompts):
        submit(driver, f"e{i}", prompt, ("last", "mean")[i % 2])
    found, tokens = {}, []
    while driver.scheduler.has_work or driver.engine._pending is not None:
        driver.step()
        for output in driver.outputs():
            if output.request_id == "text":
                tokens += output.token_ids
                assert output.embedding is None
            else:
                found[output.request_id] = np.frombuffer(output.embedding, np.float32)
    assert driver.engine.stats().num_runtime_compiles == before
    assert tokens == alone
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(
            found[f"e{i}"], expected(states, prompt, ("last", "mean")[i % 2]), atol=TOLERANCE
        )


def test_preempted_and_computed_anew(driver, states):
    token_ids = np.random.default_rng(8).integers(3, 100, 100).tolist()
    submit(driver, "e", token_ids, "mean")
    driver.step()
    driver.step()
    driver.scheduler._preempt(driver.scheduler.running[-1])
    driver.submit([5, 6, 7], max_tokens=3)  # other chunks than before
    vector = embeddings(driver)["e"]
    np.testing.assert_allclose(vector, expected(states, token_ids, "mean"), atol=TOLERANCE)


def test_on_a_mesh(tmp_path, states):
    driver = make(tmp_path, tensor=2, embeddings=True)
    token_ids = np.random.default_rng(9).integers(3, 100, 50).tolist()
    for pooling in ("last", "mean"):
        submit(driver, pooling, token_ids, pooling)
    for pooling, vector in embeddings(driver).items():
        np.testing.assert_allclose(vector, expected(states, token_ids, pooling), atol=TOLERANCE)
