"""Sampling parameters through `LLM` over a real engine: text in, log-probabilities out."""

import pathlib
from collections.abc import Iterator

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.types import InvalidRequest

LIMITS = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 200, "page_size": 8}
PROMPT = "The same words again and again, over several pages and chunks of the engine's budget."


@pytest.fixture(scope="module")
def llm(tiny_folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), process="thread", **LIMITS) as llm:
        yield llm


def test_logprobs_with_choices_chunks_and_cached_prefixes(llm: LLM):
    params = SamplingParams(
        n=3, max_tokens=8, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1,
        token_ids_logprob=(5, 9), ignore_eos=True,
    )  # fmt: skip
    [cold] = llm.generate(PROMPT, params)
    [warm] = llm.generate(PROMPT, params)
    assert [c.token_ids for c in warm.choices] == [c.token_ids for c in cold.choices]
    for output in (cold, warm):
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        assert "".join(p.token for p in rest if p) == PROMPT[1:]
        for token in rest:
            assert token is not None
            assert len(token.top) == 1
            assert [id for _, id, _ in token.named] == [5, 9]
        for choice in output.choices:
            assert choice.logprobs is not None
            assert [p.token_id for p in choice.logprobs] == choice.token_ids
            assert all(len(p.top) == 2 and len(p.named) == 2 for p in choice.logprobs)
    deltas = list(llm.stream(PROMPT, params))
    told = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert len(told) == 1
    assert told[0].index == 0
    assert len(told[0].prompt_logprobs) == len(PROMPT)


def test_what_was_computed_for_generation_scores_the_same_as_a_prompt(llm: LLM):
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0, ignore_eos=True)
    [written] = llm.generate(PROMPT, params)
    both = [*written.prompt_token_ids, *written.token_ids]
    [scored] = llm.generate([both], SamplingParams(max_tokens=1, prompt_logprobs=0))
    generated = [p.logprob for p in written.choices[0].logprobs or ()]
    prompt = [p.logprob for p in scored.prompt_logprobs or () if p]
    assert prompt[-20:] == pytest.approx(generated, abs=1e-4)


def test_bad_words_and_bias_shape_the_text(llm: LLM):
    biased = {llm.tokenize(c)[0]: 100.0 for c in "ab"}
    [plain] = llm.generate(PROMPT, SamplingParams(max_tokens=40, logit_bias=biased, seed=1))
    assert set(plain.text) == {"a", "b"}
    assert "ab" in plain.text
    [without] = llm.generate(
        PROMPT, SamplingParams(max_tokens=40, logit_bias=biased, seed=1, bad_words=("ab",))
    )
    assert set(without.text) == {"a", "b"}
    assert "ab" not in without.text
    with pytest.raises(InvalidRequest, match="logit_bias: has 258; allowed: 0 to 257"):
        llm.generate(PROMPT, SamplingParams(logit_bias={258: 1.0}))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))}, "allowed_token_ids"),
        ({"no_repeat_ngram_size": 1, "bad_words": tuple((t,) for t in range(256))}, "bad_words"),
    ],
)
def test_options_that_leave_no_token_are_the_users_mistake(llm: LLM, options, field):
    with pytest.raises(InvalidRequest, match="leave no token") as caught:
        llm.generate([list(range(256, 258))], SamplingParams(max_tokens=4, **options))
    assert caught.value.field == field
