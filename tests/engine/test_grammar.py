"""Sequences that keep to a grammar: their texts, their company, and what must not change them."""

import collections
import json
import re
import threading
import time

import jsonschema
import pytest
import random_schemas
import tiny_vocabulary
from engines import Driver, make

from jaxserve import messages
from jaxserve.constrained import compiler
from jaxserve.types import Grammar

TOKENIZER = tiny_vocabulary.tokenizer()
EOS = tuple(sorted(TOKENIZER.eos_token_ids))
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "favourite_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["full_name", "favourite_number", "colours"],
    "additionalProperties": False,
}
PROMPTS = [[5 + i, 40 + i, 90 + 2 * i] for i in range(6)]


def start(folder, **fields) -> Driver:
    changes = {"vocab_size": tiny_vocabulary.VOCAB_SIZE, "max_position_embeddings": 512}
    settings = {"max_num_seqs": 8, "max_batched_tokens": 64, "num_pages": 600, **fields}
    settings["config_changes"] = changes
    driver = make(folder, **settings)
    driver.engine._handle(messages.Vocabulary(TOKENIZER.to_json(), list(EOS)))
    return driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    return start(tmp_path_factory.mktemp("tiny"))


def run(driver: Driver, grammar: Grammar, prompts=PROMPTS, **sampling):
    """A result for each prompt; the n-th is sampled with seed n."""
    options = {"temperature": 1.0, "max_tokens": 200, "stop_token_ids": EOS, **sampling}
    driver.forget()
    ids = [driver.submit(p, grammar=grammar, seed=i, **options) for i, p in enumerate(prompts)]
    results = driver.finish()
    return [results[id] for id in ids]


def texts(results) -> list[str]:
    return [tiny_vocabulary.text_of(result.token_ids) for result in results]


def test_every_text_of_200_schemas_is_valid_or_its_schema_refused(driver):
    """Sampled at random, with a little more room than the shortest text needs or much more."""
    driver.forget()
    ids = {}
    for seed in range(200):
        schema = random_schemas.schema(seed)
        ids[seed] = driver.submit(
            [3 + seed, 4, 5],
            grammar=Grammar.json_schema(schema),
            temperature=1.0 + seed % 2,
            seed=seed,
            max_tokens=(120, 240)[seed % 3 == 0],
            stop_token_ids=EOS,
            logprobs=2 if seed % 10 == 0 else None,
        )
    results = driver.finish(check=False)
    driver.scheduler.check()
    reasons = collections.Counter()
    for seed, id in ids.items():
        schema, result = random_schemas.schema(seed), results[id]
        reasons[result.finish_reason] += 1
        if result.finish_reason == "error":
            assert "oneOf" in result.error
            assert result.token_ids == []
            continue
        jsonschema.validate(
            json.loads(tiny_vocabulary.text_of(result.token_ids)),
            schema,
            jsonschema.Draft202012Validator,
        )
        if seed % 10 == 0:
            assert len(result.logprobs) == len(result.token_ids)
    assert reasons["error"] <= 5
    assert reasons["length"] >= 20, "some must have been completed in time"
    assert reasons["stop"] >= 100


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[a-f]{2,9}-[0-9]{3}"), "[a-f]{2,9}-[0-9]{3}"),
        (Grammar.choice(["yes", "no", "perhaps"]), "yes|no|perhaps"),
        (Grammar.grammar('root ::= "<" ("a" | "b")* ">"'), "<[ab]*>"),
    ],
)
def test_other_grammars_hold(driver, grammar, pattern):
    found = texts(run(driver, grammar, max_tokens=60))
    assert all(re.fullmatch(pattern, text) for text in found), found


def test_the_overlapped_loop_and_the_other_give_the_same(driver, tmp_path):
    grammar = Grammar.json_schema(PERSON)
    expected = run(driver, grammar)
    plain = run(start(tmp_path, overlap=False), grammar)
    assert [r.token_ids for r in plain] == [r.token_ids for r in expected]


def test_preempted_equals_undisturbed(driver, tmp_path):
    grammar = Grammar.json_schema(PERSON)
    expected = run(driver, grammar, max_tokens=100)
    tiny = start(tmp_path, num_pages=26)
    preempted = run(tiny, grammar, max_tokens=100)
    assert [r.token_ids for r in preempted] == [r.token_ids for r in expected]
    assert tiny.engine.stats().num_preemptions > 0, "the test must preempt to show anything"


def test_forced_tokens_save_steps_and_change_no_text(driver):
    """Greedy. Log-probabilities have every token sampled, so with them nothing is forced."""
    grammar = Grammar.json_schema(PERSON)
    outcomes = []
    for options in ({}, {"logprobs": 0}):
        before = driver.engine.stats()
        results = run(driver, grammar, temperature=0.0, **options)
        after = driver.engine.stats()
        outcomes.append((texts(results), after.num_steps - before.num_steps))
        forced = after.num_forced_tokens - before.num_forced_tokens
        assert (forced > 0) == (not options)
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] < outcomes[1][1]


def test_log_probabilities_are_those_before_the_mask(driver):
    [result] = run(driver, Grammar.choice(["yes", "no"]), PROMPTS[:1], logprobs=3)
    [free] = run(driver, None, PROMPTS[:1], logprobs=3)
    assert result.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert result.logprobs[0].top_logprobs == pytest.approx(free.logprobs[0].top_logprobs)
    assert len(result.logprobs) == len(result.token_ids)


def test_rows_with_and_without_grammar_share_a_batch(driver):
    free = [r.token_ids for r in run(driver, None, max_tokens=30)]
    bound = [r.token_ids for r in run(driver, Grammar.json_object(), max_tokens=30)]
    driver.forget()
    ids = []
    for i, prompt in enumerate(PROMPTS):
        for grammar in (None, Grammar.json_object()):
            options = {"temperature": 1.0, "max_tokens": 30, "stop_token_ids": EOS}
            ids.append(driver.submit(prompt, grammar=grammar, seed=i, **options))
    results = driver.finish()
    mixed = [results[id].token_ids for id in ids]
    assert (mixed[::2], mixed[1::2]) == (free, bound)


def test_min_tokens_yields_to_a_grammar_that_can_only_end(driver):
    results = run(driver, Grammar.choice(["yes", "no"]), min_tokens=20)
    assert {r.finish_reason for r in results} == {"stop"}
    assert set(texts(results)) <= {"yes", "no"}


def test_min_tokens_holds_where_the_grammar_can_go_on(driver):
    results = run(driver, Grammar.regex("[a-z]+"), min_tokens=20, temperature=2.0)
    assert all(len(r.token_ids) > 20 for r in results)


def test_ignore_eos_goes_on_as_far_as_the_grammar_does(driver):
    [result] = run(
        driver, Grammar.regex("[a-z]{1,20}"), PROMPTS[:1], stop_token_ids=(), temperature=2.0
    )
    assert result.finish_reason == "stop"
    assert len(tiny_vocabulary.text_of(result.token_ids)) == 20


def test_a_stop_token_within_forced_ones_ends_the_sequence_there(driver):
    text = "Q quick brown fox"
    ids = TOKENIZER.encode(text, False)
    [result] = run(driver, Grammar.choice([text]), PROMPTS[:1], stop_token_ids=(*EOS, ids[2]))
    assert (result.token_ids, result.finish_reason) == (ids[:3], "stop")


SPELLED = {TOKENIZER.token_bytes(t).decode(errors="replace"): t for t in range(400)}
"""Token ids by their text."""


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"bad_words": tuple((t,) for text, t in SPELLED.items() if "e" in text)}, "[a-df-z]*"),
        (
            {"allowed_token_ids": (*(SPELLED[c] for c in "abcdefghijklm"), *EOS)},
            "[a-m]*",
        ),
        ({"logit_bias": {SPELLED["q"]: 100.0}, "logprobs": 1}, "q*"),
        ({"no_repeat_ngram_size": 1}, r"(?:(.)(?!.*\1))*"),
        ({"min_tokens": 12, "presence_penalty": 2.0, "typical_p": 0.9}, "[a-z]*"),
        ({"top_k": 3, "min_p": 0.01, "repetition_penalty": 1.5, "prompt_logprobs": 1}, "[a-z]*"),
    ],
)
def test_a_grammar_and_the_requests_own_options_both_hold(driver, options, pattern):
    """The letters one by one, so that the patterns are as simple as this."""
    pairs = {t: -100.0 for text, t in SPELLED.items() if len(text) > 1}
    options = {**options, "logit_bias": {**pairs, **options.get("logit_bias", {})}}
    results = run(driver, Grammar.regex("[a-z]{5,20}"), max_tokens=40, **options)
    for result, text in zip(results, texts(results), strict=True):
        assert result.error is None
        assert result.finish_reason == "stop"
        assert re.fullmatch("[a-z]{5,20}", text)
        assert re.fullmatch(pattern, text)
        assert len(result.token_ids) > options.get("min_tokens", 0)
    few = run(driver, Grammar.regex("[a-z]{5,20}"), PROMPTS[:2], max_tokens=40, **options)
    assert [r.token_ids for r in few] == [r.token_ids for r in results[:2]], "whatever else runs"
    forced = run(driver, Grammar.json_schema(PERSON), max_tokens=120, **options)
    assert all(one.error is None for one in forced)


def test_aborted_while_it_compiles_or_runs(driver):
    driver.forget()
    grammar = Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 20})
    ids = [driver.submit(p, grammar=grammar, max_tokens=300) for p in PROMPTS]
    driver.engine._handle(messages.Abort(ids[:2]))
    while not driver.scheduler.running:
        driver.step()
    driver.step()
    driver.engine._handle(messages.Abort(ids[2:]))
    results = driver.finish()
    assert {results[id].finish_reason for id in ids} == {"abort"}
    assert len(driver.scheduler.free_slots) == 8


def test_a_slow_grammar_holds_nobody_up(driver, monkeypatch):
    release, real = threading.Event(), compiler.Compiled

    def compiled(grammar, vocabulary):
        if grammar.text == "slow":
            assert release.wait(30)
        return real(grammar, vocabulary)

    monkeypatch.setattr(compiler, "Compiled", compiled)
    slow = driver.submit([3, 4, 5], grammar=Grammar.regex("slow"), max_tokens=30)
    other = driver.submit([3, 4, 6], max_tokens=5)
    bound = driver.submit([3, 4, 7], grammar=Grammar.regex("quick"), max_tokens=30)
    done: set[str] = set()
    deadline_s = time.monotonic() + 30
    while not {other, bound} <= done and time.monotonic() < deadline_s:
        driver.step()
        done |= {o.request_id for o in driver.outputs() if o.finish_reason}
    assert {other, bound} <= done
    assert slow not in done
    release.set()
    assert tiny_vocabulary.text_of(driver.finish()[slow].token_ids) == "slow"


def test_a_grammar_that_cannot_be_followed_is_the_users_error(driver):
    grammar = Grammar.regex("a[", field="guided_regex")
    id = driver.submit([3, 4, 5], grammar=grammar)
    while not (outputs := [o for o in driver.outputs() if o.finish_reason]):
        driver.step()
    assert [(o.request_id, o.finish_reason, o.invalid_field) for o in outputs] == [
        (id, "error", "guided_regex")
    ]
    assert "unclosed" in outputs[0].error


def test_nothing_compiles_at_run_time(driver):
    before = driver.engine.stats().num_runtime_compiles  # by tests that started other engines
    for options in ({"temperature": 0.0}, {"top_k": 5}, {"logprobs": 2}, {"min_tokens": 3}):
        run(driver, Grammar.json_object(), max_tokens=12, **options)
    assert driver.engine.stats().num_runtime_compiles == before
