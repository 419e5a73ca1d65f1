"""Choices that share a prompt, and beam search, on a tiny model."""

import itertools
import json
import shutil

import numpy as np
import pytest
import tiny_jax
import tiny_models

from jaxserve import LLM, SamplingParams
from jaxserve.types import InvalidRequest

LIMITS = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 200, "page_size": 8}
PROMPT = "Seven beams at a time. "


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def next_logits(tiny_folder):
    """f64[V] of the next token after a sequence, by one full forward."""
    config = json.loads((tiny_folder / "config.json").read_text())
    built = tiny_jax.registry.build(config, tiny_jax.mesh(1), "tensor", np.float32)
    leaves = tiny_jax.apply_rules(built, tiny_models.tensors(config))
    whole, cache = tiny_jax.whole(built), {}

    def logits(token_ids):
        key = tuple(token_ids)
        if key not in cache:
            padded = np.zeros(64, np.int32)  # one shape; what comes later changes nothing before
            padded[: len(key)] = key
            cache[key] = np.asarray(whole(leaves, padded))[len(key) - 1].astype(np.float64)
        return cache[key]

    return logits


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


@pytest.fixture(scope="module")
def log_probabilities(next_logits):
    return lambda token_ids: log_softmax(next_logits(token_ids))


def beam_search(log_softmax, prompt, ends, *, beams, max_tokens, penalty, early, min_tokens=0):
    """Hugging Face's, over whole rows of the vocabulary: [(score, tokens)], best first."""
    running, scores = [()], np.zeros(1)
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        table = np.stack([log_softmax([*prompt, *beam]) for beam in running]) + scores[:, None]
        if length <= min_tokens:
            table[:, list(ends)] = -np.inf
        vocab = table.shape[1]
        order = np.argsort(-table, axis=None, kind="stable")[: (1 + len(ends)) * beams]
        kept, kept_scores = [], []
        for rank, flat in enumerate(order):
            tokens = (*running[flat // vocab], int(flat % vocab))
            score = table.reshape(-1)[flat]
            if tokens[-1] in ends or length == max_tokens:
                if rank < beams:
                    done.append((score / length**penalty, tokens))
            elif len(kept) < beams:
                kept.append(tokens)
                kept_scores.append(score)
        done = sorted(done, key=lambda pair: -pair[0])[:beams]
        running, scores = kept, np.array(kept_scores)
        if not running or (early is True and len(done) == beams):
            break
        reach = max_tokens if early == "never" and penalty > 0 else length
        if len(done) == beams and scores[0] / reach**penalty <= done[-1][0]:
            break
    return done


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
def test_beam_search_is_the_definition(llm, log_probabilities, early, penalty):
    prompt, max_tokens, beams = llm.tokenize(PROMPT), 12, 4
    # Tokens of the likeliest continuations as ends, so that beams end early and at many lengths.
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))[0].token_ids
    ends = (0, greedy[2], greedy[5])
    params = SamplingParams(
        n=3, best_of=beams, use_beam_search=True, max_tokens=max_tokens, length_penalty=penalty,
        early_stopping=early, stop_token_ids=ends, logprobs=2,
    )  # fmt: skip
    output = llm.generate(PROMPT, params)[0]
    expected = beam_search(
        log_probabilities, prompt, ends,
        beams=beams, max_tokens=max_tokens, penalty=penalty, early=early,
    )  # fmt: skip
    assert [tuple(choice.token_ids) for choice in output.choices] == [t for _, t in expected[:3]]
    for choice, (score, tokens) in zip(output.choices, expected, strict=False):
        total = sum(token.logprob for token in choice.logprobs)
        assert total / len(tokens) ** penalty == pytest.approx(score, abs=1e-4)
        assert [token.token_id for token in choice.logprobs] == list(tokens)
        assert all(len(token.top) == 2 for token in choice.logprobs)
        assert choice.finish_reason == ("stop" if tokens[-1] in ends else "length")


def test_beam_search_without_an_early_end(llm, log_probabilities):
    prompt = llm.tokenize(PROMPT)
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0))[0].token_ids
    params = SamplingParams(
        n=2, use_beam_search=True, max_tokens=6, min_tokens=4, stop_token_ids=(greedy[1],)
    )
    output = llm.generate(PROMPT, params)[0]
    expected = beam_search(
        log_probabilities, prompt, (0, greedy[1]),
        beams=2, max_tokens=6, penalty=1.0, early=False, min_tokens=4,
    )  # fmt: skip
    assert [tuple(choice.token_ids) for choice in output.choices] == [t for _, t in expected]
    assert all(len(choice.token_ids) > 4 for choice in output.choices)


PENALTIES = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize("defaults", [False, True])
def test_beams_are_scored_after_the_penalties(llm, next_logits, tiny_folder, tmp_path, defaults):
    """Those of the request, and those of the model's generation_config.json."""
    prompt = llm.tokenize(PROMPT)

    def penalized(token_ids):
        logits, seen = next_logits(token_ids).copy(), list(set(token_ids))
        factor = np.where(logits[seen] > 0, 1 / 1.7, 1.7)
        logits[seen] *= factor
        pairs = itertools.pairwise(token_ids)
        logits[[after for before, after in pairs if before == token_ids[-1]]] = -np.inf
        return log_softmax(logits)

    params = SamplingParams(
        n=2, best_of=3, use_beam_search=True, max_tokens=8, **({} if defaults else PENALTIES)
    )
    if defaults:
        folder = shutil.copytree(tiny_folder, tmp_path / "tiny")
        (folder / "generation_config.json").write_text(json.dumps(PENALTIES))
        with LLM(str(folder), **LIMITS) as model:
            output = model.generate(PROMPT, params)[0]
    else:
        output = llm.generate(PROMPT, params)[0]
    expected = beam_search(
        penalized, prompt, (0,), beams=3, max_tokens=8, penalty=1.0, early=False
    )  # fmt: skip
    assert [tuple(choice.token_ids) for choice in output.choices] == [t for _, t in expected[:2]]
    plain = llm.generate(PROMPT, SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=8))
    assert [c.token_ids for c in plain[0].choices] != [c.token_ids for c in output.choices]


def test_beams_that_run_out_of_tokens_are_refused(llm):
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=300, no_repeat_ngram_size=1)
    with pytest.raises(InvalidRequest):
        llm.generate(list(range(1, 200)), params)


@pytest.mark.parametrize("repeats", [1, 8])
def test_choices_compute_their_prompt_once(llm, repeats):
    """Also one that takes several steps: the others come when it's computed, or wait for it."""
    llm.flush_cache()
    prompt = llm.tokenize(PROMPT * repeats)
    before = llm.stats()
    output = llm.generate([prompt], SamplingParams(n=6, max_tokens=3, seed=11))[0]
    after = llm.stats()
    size = LIMITS["page_size"]
    shared = (len(prompt) - 1) // size * size
    computed = after.computed_tokens - before.computed_tokens
    assert computed <= len(prompt) + 5 * (len(prompt) - shared) + 6 * 3
    assert after.cached_tokens - before.cached_tokens == 5 * shared
    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1
    again = llm.generate([prompt], SamplingParams(n=6, max_tokens=3, seed=11))[0]
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in output.choices]
    first = llm.generate([prompt], SamplingParams(n=2, max_tokens=3, seed=11))[0]
    assert [c.token_ids for c in first.choices] == [c.token_ids for c in output.choices[:2]]
