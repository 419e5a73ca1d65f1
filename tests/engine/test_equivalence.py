"""What must not change a single token: batching, caching, chunking, preemption, overlap, tensor
parallelism."""

import functools

import numpy as np
import pytest
from engines import Driver, make

from jaxserve.engine import start
from jaxserve.execution.buckets import Buckets

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(3, 100, size).tolist() for size in (1, 3, 8, 9, 17, 30, 45, 70)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(driver) -> list[list[int]]:
    """Each prompt by itself in a cold engine: what all else is compared with."""
    results = []
    for prompt in PROMPTS:
        driver.forget()
        results += driver.generate([prompt])
    driver.forget()
    assert len({tuple(r) for r in results}) == len(PROMPTS), (
        "prompts must differ in what they bring"
    )
    return results


def test_batched_equals_alone(driver, alone):
    driver.forget()
    assert driver.generate(PROMPTS) == alone


def test_cached_equals_cold(driver, alone):
    driver.forget()
    driver.generate(PROMPTS)
    ids = [driver.submit(prompt) for prompt in PROMPTS]
    results = driver.finish()
    assert [results[id].token_ids for id in ids] == alone
    page = driver.info.page_size
    cached = [results[id].cached for id in ids]
    assert cached == [(len(p) - 1) // page * page for p in PROMPTS]


def test_arrival_in_any_order_and_at_any_time_changes_nothing(driver, alone):
    order = np.random.default_rng(1).permutation(len(PROMPTS))
    driver.forget()
    ids = {}
    for index in order:
        ids[index] = driver.submit(PROMPTS[index])
        driver.step()
        driver.step()
    results = driver.finish()
    assert [results[ids[i]].token_ids for i in range(len(PROMPTS))] == alone


def test_chunked_equals_unchunked(driver, alone, tmp_path):
    """The fixture's budget of 32 tokens cuts the long prompts; one of 128 cuts none."""
    whole = make(tmp_path, max_batched_tokens=128)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        whole.forget()
        assert whole.generate([prompt]) == [expected]


def test_preempted_equals_undisturbed(driver, tmp_path):
    driver.forget()
    expected = driver.generate(PROMPTS, max_tokens=60)
    tiny = make(tmp_path, num_pages=18)
    assert tiny.generate(PROMPTS, max_tokens=60) == expected
    assert tiny.engine.stats().num_preemptions > 0, "the test must preempt to show anything"


def test_overlapped_equals_synchronous(driver, alone, tmp_path):
    synchronous = make(tmp_path, overlap=False)
    assert synchronous.generate(PROMPTS) == alone


def test_rows_of_logits_that_only_pad_change_nothing(driver, alone, tmp_path, monkeypatch):
    """Shapes as a GPU has them."""
    as_on_a_gpu = functools.partial(Buckets.choose, platform="gpu")
    monkeypatch.setattr(start.Buckets, "choose", lambda *, platform, **sizes: as_on_a_gpu(**sizes))
    padded = make(tmp_path)
    assert padded.generate(PROMPTS) == alone
    assert padded.generate(PROMPTS[:3]) == alone[:3]
    assert padded.generate(PROMPTS, logprobs=2) == alone


def test_without_prefix_cache_nothing_is_cached(driver, alone, tmp_path):
    plain = make(tmp_path, prefix_cache=False)
    for _ in range(2):
        ids = [plain.submit(prompt) for prompt in PROMPTS]
        results = plain.finish()
        assert [results[id].token_ids for id in ids] == alone
        assert all(results[id].cached == 0 for id in ids)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_equals_one_device(alone, tmp_path, tensor):
    """Eight devices share four kv heads, so each is kept twice; 101 words of vocabulary divide by
    none."""
    parallel = make(tmp_path, tensor=tensor, max_num_seqs=2)
    assert parallel.generate(PROMPTS) == alone
    assert parallel.info.mesh["tensor"] == tensor


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05},
    ],
)
def test_a_seed_gives_the_same_tokens_in_any_batch(driver, tmp_path, options):
    seeds = range(100, 100 + len(PROMPTS))
    alone = []
    for prompt, seed in zip(PROMPTS, seeds, strict=True):
        driver.forget()
        alone += driver.generate([prompt], seed=seed, **options)
    driver.forget()
    ids = [driver.submit(p, seed=s, **options) for p, s in zip(PROMPTS, seeds, strict=True)]
    # a greedy row and one of another kind share the batch
    driver.submit([5, 6, 7])
    driver.submit([7, 6, 5], temperature=0.5, top_k=3, logprobs=2)
    results = driver.finish()
    assert [results[id].token_ids for id in ids] == alone
    other = driver.generate([PROMPTS[0]], seed=7, **options)
    assert other != alone[:1]


def test_a_seed_survives_preemption(driver, tmp_path):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    driver.forget()
    expected = driver.generate(PROMPTS, **options)
    tiny = make(tmp_path, num_pages=18)
    assert tiny.generate(PROMPTS, **options) == expected
    assert tiny.engine.stats().num_preemptions > 0
