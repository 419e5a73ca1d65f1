"""Structured output from a real engine of a tiny model, through the Python API."""

import json
import re

import msgspec
import pytest
import tiny_vocabulary
from engines import write_model

from jaxserve import LLM, Grammar, InvalidRequest, SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=tiny_vocabulary.VOCAB_SIZE,
        max_position_embeddings=512,
    )
    tiny_vocabulary.tokenizer().save(folder)
    settings = {"max_num_seqs": 8, "max_batched_tokens": 64, "page_size": 8, "num_pages": 600}
    with LLM(str(folder), **settings) as llm:
        yield llm


def test_choices_deltas_stops_and_usage(llm):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = SamplingParams(
        grammar=Grammar.json_schema(schema), n=3, max_tokens=60, temperature=1.0, seed=1
    )
    [output] = llm.generate("The quick", params)
    found = [json.loads(choice.text) for choice in output.choices]
    assert all(isinstance(one["name"], str) for one in found)
    streamed = ["", "", ""]
    for delta in llm.stream("The quick", params):
        assert delta.token_ids or delta.finish_reason
        streamed[delta.index] += delta.text
    assert streamed == [choice.text for choice in output.choices]
    stopping = SamplingParams(grammar=Grammar.choice(["one two three"]), stop=" t")
    [output] = llm.generate("The quick", stopping)
    assert (output.text, output.choices[0].stop_reason) == ("one", " t")


def test_the_best_of_several_and_no_beams(llm):
    params = SamplingParams(
        grammar=Grammar.regex("[a-f]{2,9}"), best_of=4, n=2, max_tokens=20, logprobs=1, seed=2
    )
    [output] = llm.generate("The quick", params)
    means = []
    for choice in output.choices:
        assert re.fullmatch("[a-f]{2,9}", choice.text)
        means.append(sum(one.logprob for one in choice.logprobs) / len(choice.logprobs))
    [everyone] = llm.generate("The quick", msgspec.structs.replace(params, best_of=None, n=4))
    assert {choice.text for choice in output.choices} <= {c.text for c in everyone.choices}
    assert means == sorted(means, reverse=True)
    bad = msgspec.structs.replace(params, grammar=Grammar.regex("a["))
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match=r"grammar: .*unclosed"):
            call("x", bad)


def test_a_text_that_its_grammar_ends_is_whole_without_an_end_token(llm):
    [output] = llm.generate("x", SamplingParams(grammar=Grammar.choice(["fox}"]), ignore_eos=True))
    assert (output.text, output.finish_reason) == ("fox}", "stop")


def test_a_grammar_that_cannot_be_followed_raises_before_anything_runs(llm):
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match=r"grammar: .*unclosed"):
            call("x", SamplingParams(grammar=Grammar.regex("a[")))
    [output] = llm.generate("x", SamplingParams(grammar=Grammar.regex("ab")))
    assert output.text == "ab"
