"""Compiling in threads: the cache, the time limit, what is counted."""

import threading
import time

import pytest
import tiny_vocabulary

from jaxserve.constrained import compiler
from jaxserve.constrained.compiler import Grammars
from jaxserve.types import Grammar, InvalidRequest, TokenSampling

SAMPLING = TokenSampling(max_tokens=10)


@pytest.fixture
def grammars():
    made = make()
    yield made
    made.close()


def make(timeout_s: float = 30.0) -> Grammars:
    grammars = Grammars(tiny_vocabulary.VOCAB_SIZE, timeout_s)
    tokenizer = tiny_vocabulary.tokenizer()
    grammars.use_vocabulary(tokenizer.to_json(), sorted(tokenizer.eos_token_ids))
    return grammars


def wait(job: compiler.Job) -> None:
    deadline_s = time.monotonic() + 30
    while not job.is_over():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_grammar_is_compiled_once(grammars):
    jobs = [grammars.compile(Grammar.regex("[0-9]+", field=f)) for f in ("a", "b", "c")]
    for job in jobs:
        wait(job)
        assert job.matcher(SAMPLING).error == ""
    wait(grammars.compile(Grammar.choice(["[0-9]+"])))
    assert (grammars.compile_seconds.count, grammars.num_hits, grammars.num_requests) == (2, 2, 4)
    assert grammars.compile_seconds.total > 0


def test_matchers_of_one_grammar_are_independent(grammars):
    job = grammars.compile(Grammar.choice(["ab", "cd"]))
    wait(job)
    first, second = job.matcher(SAMPLING), job.matcher(SAMPLING)
    [token, *_] = tiny_vocabulary.tokenizer().encode("a", False)
    first.advance(token, 9)
    [token, *_] = tiny_vocabulary.tokenizer().encode("c", False)
    assert second.advance(token, 9)[1] is None
    assert second.error == ""


def test_an_error_names_the_field_and_is_remembered(grammars):
    for count in (1, 2):
        job = grammars.compile(Grammar.regex("a[", field="guided_regex"))
        wait(job)
        with pytest.raises(InvalidRequest, match="unclosed") as caught:
            job.matcher(SAMPLING)
        assert caught.value.field == "guided_regex"
        assert (grammars.compile_seconds.count, grammars.num_failures) == (1, count)


def test_the_least_recently_used_grammar_is_dropped(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        wait(grammars.compile(Grammar.regex(pattern)))
    assert (grammars.compile_seconds.count, grammars.num_hits) == (4, 2)


def test_a_grammar_that_takes_too_long_is_given_up_and_others_go_on(monkeypatch):
    release = threading.Event()
    real = compiler.Compiled

    def compiled(grammar, vocabulary):
        if grammar.text == "slow":
            assert release.wait(30)
        return real(grammar, vocabulary)

    monkeypatch.setattr(compiler, "Compiled", compiled)
    grammars = make(timeout_s=0.3)
    try:
        slow, quick = grammars.compile(Grammar.regex("slow")), grammars.compile(Grammar.regex("q"))
        wait(quick)
        quick.matcher(SAMPLING)
        wait(slow)
        with pytest.raises(InvalidRequest, match=r"grammar: takes longer than 0\.3 s"):
            slow.matcher(SAMPLING)
    finally:
        release.set()
        grammars.close()


def test_without_a_vocabulary_there_are_no_grammars():
    grammars = Grammars(100, 10)
    job = grammars.compile(Grammar.regex("a"))
    wait(job)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        job.matcher(SAMPLING)
    grammars.close()


def test_a_tokenizer_may_have_more_tokens_than_the_model():
    tokenizer = tiny_vocabulary.tokenizer()
    grammars = Grammars(300, 10)
    grammars.use_vocabulary(tokenizer.to_json(), sorted(tokenizer.eos_token_ids))
    job = grammars.compile(Grammar.regex("[a-z]+"))
    wait(job)
    assert job.matcher(SAMPLING).error == ""
    grammars.close()
