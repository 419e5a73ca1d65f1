"""Loads: seeded, of the lengths asked for, sharing what they say they share."""

import itertools

import numpy as np
import pytest

from bench import trace, workloads


def test_shrunken_requests_are_the_traces_own():
    whole = trace.make_trace(50, 0, 500)
    shrunk = workloads.trace_requests(50, 8, 500)
    for (prompt, length), (short, fewer) in zip(whole, shrunk, strict=True):
        assert short == prompt[: max(1, len(prompt) // 8)]
        assert fewer == max(1, length // 8)
    assert workloads.trace_requests(50, 1, 500) == whole


def test_poisson_arrivals_have_the_rate_and_exponential_gaps():
    arrivals = workloads.poisson_arrivals(20_000, 5.0)
    gaps = np.diff([0.0, *arrivals])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # an exponential's is its mean
    assert np.mean(gaps > 0.2) == pytest.approx(np.exp(-1), abs=0.01)
    assert arrivals == workloads.poisson_arrivals(20_000, 5.0)
    assert arrivals != workloads.poisson_arrivals(20_000, 5.0, seed=1)


def test_few_shot_prompts_share_their_tasks_examples():
    prompts = workloads.few_shot(3, 4, 20, 6, 1000)
    assert len(prompts) == 12
    assert len({tuple(p[:20]) for p in prompts}) == 3
    for task in range(3):
        assert len({tuple(p[:20]) for p in prompts[task::3]}) == 1
    assert len({tuple(p) for p in prompts}) == 12
    assert all(3 <= len(p) - 20 <= 9 for p in prompts)
    assert prompts == workloads.few_shot(3, 4, 20, 6, 1000)


def test_a_turn_repeats_all_that_was_said():
    one, other = workloads.multi_turn(2, 3, 10, 4, 1000)
    assert one.history == other.history
    first = one.say(0)
    one.hear([7, 8])
    second = one.say(1)
    assert second == [*first, 7, 8, *one.messages[1]]
    assert first == [*other.history, *one.messages[0]]
    assert one.messages != other.messages


def test_shareable_tokens_are_those_of_whole_pages_seen_before():
    shots = list(range(100, 110))
    prompts = [[*shots, 1, 2, 3], [*shots, 4, 5, 6], [*shots, 1, 2, 3, 9], [50, *shots]]
    # pages of 4: 8 tokens of the examples; the third also begins with the first's 12
    assert workloads.shareable_tokens(prompts, 4) == 8 + 12
    assert workloads.shareable_tokens([[1, 2, 3, 4]] * 2, 4) == 0  # the last token is computed

    def longest_page_prefix(a, b, size):
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b))))  # noqa: B905
        return min(same, len(a) - 1) // size * size

    prompts = workloads.few_shot(2, 5, 21, 4, 12)
    expected = sum(
        max((longest_page_prefix(p, earlier, 8) for earlier in prompts[:i]), default=0)
        for i, p in enumerate(prompts)
    )
    assert workloads.shareable_tokens(prompts, 8) == expected > 0
