"""Sampling parameters in a running engine: each token is the one that NumPy takes from the step's
logits and the tokens before it, with overlap, chunks, cached prefixes and preemption on."""

import itertools

import jax
import numpy as np
import numpy_sampler as reference
import pytest
from engines import Driver, make

from jaxserve.execution import sampling, step
from jaxserve.types import TokenLogprobs

uniform = jax.jit(sampling.uniform)
rng = np.random.default_rng(8)
PROMPTS = [rng.integers(3, 100, size).tolist() for size in (1, 3, 8, 17, 30, 70)]
OPTIONS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0, "temperature": 1.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 1.5, "temperature": 0.7, "top_p": 0.9},
    {"no_repeat_ngram_size": 3, "temperature": 1.0, "top_k": 5},
    {"no_repeat_ngram_size": 2},
    {"bad_words": tuple((a, b) for a in range(3, 40) for b in range(3, 26))},
    {"logit_bias": {5: 3.0, 60: -100.0, 61: 2.0}, "temperature": 1.3},
    {"allowed_token_ids": (4, 9, 50, 51, 52), "temperature": 1.0, "seed": 4},
    {"min_tokens": 10, "stop_token_ids": tuple(range(0, 101, 2)), "temperature": 1.0},
    {"typical_p": 0.5, "temperature": 1.2},
    {"logprobs": 3, "logprobs_mode": "processed_logprobs", "top_k": 9, "temperature": 1.0},
    {"logprobs": -1, "temperature": 1.0},
    {"token_ids_logprob": (7, 3)},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"prompt_logprobs": 0, "prompt_logprobs_start": 1},
    {"prompt_logprobs": -1, "repetition_penalty": 1.4, "token_ids_logprob": (1,)},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01, "num_tokens": 60},
]


class Watch:
    """Keeps the logits that each token of each request was sampled from."""

    def __init__(self, driver: Driver):
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self.driver = driver
        self.sample = driver.runner.sample
        driver.runner.sample = self._watched

    def _watched(self, batch, logits, grammar_masks=None):
        array = np.array(logits)  # those that a mask is applied to are donated
        for r, row in enumerate(batch.rows):
            if row.samples or row.scores:
                key = (row.sequence.request.request_id, row.start + row.num_tokens)
                self.logits[key] = array[r]
        return self.sample(batch, logits, grammar_masks)

    def check(self, request, result) -> None:
        """Holds all of a request's results to the definition."""
        options, prompt = request.sampling, request.token_ids
        assert result.error is None, result.error
        read = iter(result.logprobs)
        for i, token in enumerate(result.token_ids):
            position, output = len(prompt) + i, result.token_ids[:i]
            logits = self.logits[request.request_id, position]
            allowed = reference.allowed_logits(logits, options, prompt, output)
            kept = reference.kept_logits(allowed, options)
            seed = [np.array([step._signed(options.seed >> shift)], np.int32) for shift in (0, 32)]
            u = float(uniform(*seed, np.array([position], np.int32))[0])
            reference.check_token(token, kept, options.temperature, u)
            if options.logprobs is not None or options.token_ids_logprob:
                asked = kept if options.logprobs_mode == "processed_logprobs" else logits
                check_logprobs(next(read), asked, options.logprobs, options, token)
        assert next(read, None) is None
        if options.prompt_logprobs is None:
            assert not result.prompt_logprobs
            return
        first = options.prompt_logprobs_start + 1
        assert len(result.prompt_logprobs) == len(prompt) - first
        for i, found in enumerate(result.prompt_logprobs, start=first):
            logits = self.logits[request.request_id, i]
            check_logprobs(found, logits, options.prompt_logprobs, options, prompt[i])


def check_logprobs(found: TokenLogprobs, logits, count, options, token: int) -> None:
    expected = reference.log_softmax(logits.astype(np.float64))
    count = len(logits) if count == -1 else count or 0
    assert len(found.top_ids) == count
    named = [expected[t] for t in options.token_ids_logprob]
    for ours, theirs in (
        ([found.logprob], [expected[token]]),
        (found.top_logprobs, expected[found.top_ids]),
        (found.top_logprobs, -np.sort(-expected)[:count]),
        (found.named, named),
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def run_all(driver: Driver, max_tokens: int, *, one_by_one: bool = False) -> list:
    """Every option with every prompt, as many at once as there are slots; results by number."""
    watch, num_compiles = Watch(driver), driver.runner.num_runtime_compiles
    requests, results = {}, {}
    try:
        for number, (options, prompt) in enumerate(
            (o, PROMPTS[(i + j) % len(PROMPTS)]) for i, o in enumerate(OPTIONS) for j in range(2)
        ):
            id = driver.submit(
                prompt, **{"max_tokens": max_tokens, "seed": number, "temperature": 0.0, **options}
            )
            requests[id] = driver.scheduler.sequences[id].request
            if one_by_one:
                results |= driver.finish()
            else:
                driver.step()
        results |= driver.finish()
    finally:
        driver.runner.sample = watch.sample
    assert driver.runner.num_runtime_compiles == num_compiles
    for id, request in requests.items():
        watch.check(request, results[id])
    return [(results[id].token_ids, results[id].finish_reason) for id in requests]


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(driver) -> list:
    driver.forget()
    return run_all(driver, 24, one_by_one=True)


def test_mixed_batches_with_overlap_equal_alone(driver, alone):
    driver.forget()
    assert run_all(driver, 24) == alone
    assert run_all(driver, 24) == alone, "with cached prefixes"
    assert driver.scheduler.cached_tokens > 0


def test_synchronous_equals_overlapped(alone, tmp_path):
    assert run_all(make(tmp_path, overlap=False), 24) == alone


def test_preempted_and_chunked_equal_undisturbed(driver, tmp_path):
    driver.forget()
    expected = run_all(driver, 60)
    tiny = make(tmp_path, num_pages=18, max_batched_tokens=9)
    assert run_all(tiny, 60) == expected
    assert tiny.scheduler.num_preemptions > 0, "the test must preempt to show anything"


def test_what_the_options_promise(driver):
    driver.forget()
    prompt = PROMPTS[4]
    (tokens,) = driver.generate([prompt], max_tokens=60, no_repeat_ngram_size=2)
    runs = list(itertools.pairwise(prompt + tokens))
    generated = runs[len(prompt) - 1 :]
    assert all(run not in runs[: len(prompt) - 1 + i] for i, run in enumerate(generated))
    words = ((tokens[0],), tuple(tokens[3:5]))
    (without,) = driver.generate([prompt], max_tokens=60, bad_words=words)
    assert tokens[0] not in without
    assert words[1] not in list(itertools.pairwise(without))
    (only,) = driver.generate([prompt], max_tokens=20, allowed_token_ids=(8, 9), temperature=1.0)
    assert set(only) == {8, 9}


def test_a_request_whose_options_leave_no_token_fails_alone(driver):
    driver.forget()
    other = driver.submit(PROMPTS[1])
    id = driver.submit(
        [50, 51], allowed_token_ids=(40, 41), no_repeat_ngram_size=1, temperature=1.0
    )
    results = driver.finish()
    assert sorted(results[id].token_ids) == [40, 41]
    assert "leave no token" in results[id].error
    assert results[other].finish_reason == "length"


def test_prompt_logprobs_come_whole_despite_a_cached_prefix_and_leave_one(driver):
    driver.forget()
    prompt = PROMPTS[5]
    driver.generate([prompt])
    first = driver.submit(prompt, prompt_logprobs=1)
    results = driver.finish()
    assert len(results[first].prompt_logprobs) == len(prompt) - 1
    assert results[first].cached == 0
    again = driver.submit(prompt)
    assert driver.finish()[again].cached > 0


def test_prompt_logprobs_of_the_last_tokens_use_the_cache_and_take_one_step(tmp_path):
    driver = make(tmp_path, max_num_seqs=16)
    page = driver.info.page_size
    shared = [20 + i % 50 for i in range(2 * page + 3)]
    endings = [[90, 91], [92, 93], [94]]
    expected = {}
    for ending in endings:
        driver.forget()
        whole = driver.submit(shared + ending, prompt_logprobs=0, max_tokens=1)
        scores = driver.finish()[whole].prompt_logprobs
        expected[tuple(ending)] = [one.logprob for one in scores[-len(ending) :]]
    driver.forget()
    driver.generate([shared], max_tokens=1)
    before = driver.engine.stats()
    options = {"prompt_logprobs": 0, "prompt_logprobs_start": len(shared) - 1, "max_tokens": 1}
    ids = [driver.submit(shared + ending, **options) for ending in endings]
    results = driver.finish()
    assert driver.engine.stats().num_steps - before.num_steps == 1
    # of each: the 3 tokens that are not in a whole page, and the ending
    assert driver.engine.stats().computed_tokens - before.computed_tokens == 3 * 3 + 5
    for id, ending in zip(ids, endings, strict=True):
        assert results[id].cached == 2 * page
        found = [one.logprob for one in results[id].prompt_logprobs]
        np.testing.assert_allclose(found, expected[tuple(ending)], atol=2e-5)


def test_a_slot_leaves_nothing_to_the_next_sequence(driver):
    driver.forget()
    expected = driver.generate([PROMPTS[0]], presence_penalty=0.5)
    for _ in range(2 * driver.info.max_num_seqs):
        driver.generate(
            [PROMPTS[3]], logit_bias={t: 100.0 for t in range(9)}, repetition_penalty=2.0
        )
        beside = driver.submit(PROMPTS[2], repetition_penalty=3.0)
        id = driver.submit(PROMPTS[0], presence_penalty=0.5)
        results = driver.finish()
        assert results[id].token_ids == expected[0]
        assert results[beside].error is None
