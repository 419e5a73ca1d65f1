"""What a matcher allows, forces and closes."""

import json
import random

import jsonschema
import numpy as np
import pytest
import random_schemas
import tiny_vocabulary

from jaxserve.constrained.compiler import Compiled
from jaxserve.constrained.matcher import LlguidanceMatcher, leads_to_end
from jaxserve.constrained.source import GrammarError
from jaxserve.constrained.vocabulary import Vocabulary
from jaxserve.types import Grammar

TOKENIZER = tiny_vocabulary.tokenizer()
EOS = sorted(TOKENIZER.eos_token_ids)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER.to_json(), EOS, tiny_vocabulary.VOCAB_SIZE)


def matcher_of(vocabulary: Vocabulary, grammar: Grammar, **options) -> LlguidanceMatcher:
    compiled = Compiled(grammar, vocabulary)
    options = {"stop_token_ids": EOS, **options}
    return LlguidanceMatcher(vocabulary, compiled.start, compiled.shortest, **options)


def allowed(matcher: LlguidanceMatcher, vocabulary: Vocabulary) -> list[int]:
    mask = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    if not matcher.fill_special(mask):
        matcher.native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        matcher.finish_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def generate(matcher, vocabulary, rng, max_tokens) -> tuple[list[int], str]:
    """Tokens drawn with equal chances from what is allowed, and the reason of the end."""
    token_ids: list[int] = []
    while True:
        choices = allowed(matcher, vocabulary)
        assert choices
        assert max(choices) < TOKENIZER.vocab_size, "padding of the vocabulary is never allowed"
        new, reason = matcher.advance(rng.choice(choices), max_tokens - len(token_ids))
        token_ids += new
        assert reason != "error", matcher.error
        if reason is not None or len(token_ids) == max_tokens:
            return token_ids, reason or "length"


def test_texts_are_complete_when_their_tokens_run_out(vocabulary):
    """Whatever is sampled, token by token or not, with little room or much."""
    rng = random.Random(3)
    num_complete = 0
    for seed in range(150):
        schema = random_schemas.schema(seed)
        try:
            compiled = Compiled(Grammar.json_schema(schema), vocabulary)
        except GrammarError:
            continue
        assert compiled.shortest is not None, schema
        assert leads_to_end(compiled.start, compiled.shortest)
        for token_by_token in (False, True):
            matcher = LlguidanceMatcher(
                vocabulary, compiled.start, compiled.shortest, stop_token_ids=EOS,
                token_by_token=token_by_token,
            )  # fmt: skip
            room = len(compiled.shortest) + rng.choice([20, 60, 150])
            token_ids, _ = generate(matcher, vocabulary, rng, room)
            assert len(token_ids) <= room
            jsonschema.validate(
                json.loads(tiny_vocabulary.text_of(token_ids)),
                schema,
                jsonschema.Draft202012Validator,
            )
            num_complete += 1
    assert num_complete > 250


def test_what_has_no_room_at_all_ends_in_the_middle(vocabulary):
    matcher = matcher_of(vocabulary, Grammar.regex("[a-z]{30}!"))
    token_ids, reason = generate(matcher, vocabulary, random.Random(0), 3)
    assert (len(token_ids), reason) == (3, "length")


def test_forced_tokens_follow_at_once_and_the_end_needs_no_end_token(vocabulary):
    matcher = matcher_of(vocabulary, Grammar.choice(["Q quick brown fox", "no"]))
    [first, *rest] = TOKENIZER.encode("Q quick brown fox", False)
    tokens, reason = matcher.advance(first, 50)
    assert tokens == [first, *rest]
    assert reason == "stop"


def test_forced_tokens_keep_to_the_room(vocabulary):
    matcher = matcher_of(vocabulary, Grammar.choice(["Q quick brown fox", "no"]))
    [first, *rest] = TOKENIZER.encode("Q quick brown fox", False)
    tokens, reason = matcher.advance(first, 3)
    assert tokens == [first, *rest[:2]]
    assert reason is None


def test_token_by_token_nothing_is_forced(vocabulary):
    text = "Q quick brown fox"
    matcher = matcher_of(vocabulary, Grammar.choice([text, "no"]), token_by_token=True)
    ids = TOKENIZER.encode(text, False)
    advanced = [matcher.advance(token, len(ids) - i) for i, token in enumerate(ids)]
    assert [tokens for tokens, _ in advanced] == [[token] for token in ids]
    assert advanced[-1][1] == "stop"


def test_an_end_token_that_the_request_ignores_is_allowed_only_where_nothing_else_is(vocabulary):
    [digit] = TOKENIZER.encode("7", False)
    heeds = matcher_of(vocabulary, Grammar.regex("[0-9]{1,2}"))
    heeds.advance(digit, 9)
    assert set(EOS) <= set(allowed(heeds, vocabulary))
    ignores = matcher_of(vocabulary, Grammar.regex("[0-9]{1,2}"), stop_token_ids=())
    ignores.advance(digit, 9)
    assert not set(EOS) & set(allowed(ignores, vocabulary))
    nothing = matcher_of(vocabulary, Grammar.regex(""), stop_token_ids=())
    assert set(allowed(nothing, vocabulary)) == set(EOS)
    assert nothing.advance(EOS[0], 9) == ([EOS[0]], "stop")


def test_a_token_that_does_not_fit_is_an_error_with_its_reason(vocabulary):
    matcher = matcher_of(vocabulary, Grammar.regex("[0-9]+"))
    assert matcher.advance(TOKENIZER.encode("x", False)[0], 9) == ([], "error")
    assert "can't be followed" in matcher.error
    assert len(allowed(matcher, vocabulary)) > 0
