"""The real SmolLM2-135M-Instruct through the Python API, against what transformers generates from
the same file."""

import json
import pathlib

import pytest

from jaxserve import LLM, Grammar, SamplingParams
from jaxserve.config import cache_dir

FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures" / "smollm2_greedy.json"
TIE = 1e-3
"""Leads of the best logit over the second below this are ties: float32 in another order may swap
them."""

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm():
    if not (cache_dir() / "models" / "smollm2-135m-instruct").exists():
        pytest.fail("the model is not pulled; `make test` does that")
    with LLM(
        "smollm2-135m-instruct",
        process="spawn",
        max_num_seqs=8,
        max_batched_tokens=128,
        max_model_len=2048,
    ) as llm:
        yield llm


def test_greedy_tokens_equal_transformers(llm):
    records = json.loads(FIXTURE.read_text())["records"]
    assert len(records) == 20
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    results = llm.generate([record["prompt"] for record in records], params)
    for record, result in zip(records, results, strict=True):
        assert result.prompt_token_ids == record["prompt_ids"], record["prompt"]
        for index, (ours, theirs) in enumerate(
            zip(result.token_ids, record["token_ids"], strict=True)
        ):
            if ours != theirs:
                lead = record["lead"][index]
                assert lead < TIE, f"{record['prompt']!r} differs at {index}, no tie: lead {lead}"
                break


def test_streamed_equals_whole(llm):
    prompt, params = "Once upon a time", SamplingParams(max_tokens=40, temperature=0.9, seed=5)
    [whole] = llm.generate(prompt, params)
    deltas = list(llm.stream(prompt, params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [id for delta in deltas for id in delta.token_ids] == whole.token_ids
    assert deltas[-1].usage is not None
    assert len(deltas) > 5, "text must come in pieces"


def test_choices_share_the_prompt_and_differ(llm):
    [result] = llm.generate(
        "My favourite animal is", SamplingParams(n=4, max_tokens=12, temperature=1, seed=1)
    )
    assert len({choice.text for choice in result.choices}) > 1
    assert result.usage.completion_tokens == sum(len(c.token_ids) for c in result.choices)


def test_second_turn_of_a_chat_computes_only_what_is_new(llm):
    """The first turn has some 1,000 tokens; of the second, all but its own and one page are
    cached."""
    story = " ".join(
        f"On day {i} the sailor saw {i * 3} birds and wrote it down." for i in range(62)
    )
    # a stop token would be found a step late, with one token more computed
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    chat = [{"role": "user", "content": story}]
    [first] = llm.chat(chat, params)
    assert first.usage.prompt_tokens > 1000
    before = llm.stats()
    chat += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "How many birds on day 3?"},
    ]
    [second] = llm.chat(chat, params)
    computed = (
        llm.stats().computed_tokens - before.computed_tokens - (second.usage.completion_tokens - 1)
    )
    new = second.usage.prompt_tokens - first.usage.prompt_tokens
    page = llm.info.page_size
    assert computed <= new + page
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - page
    assert second.usage.cached_tokens == second.usage.prompt_tokens - computed
    assert llm.stats().cached_tokens - before.cached_tokens == second.usage.cached_tokens


def test_a_stop_string_across_tokens_never_shows(llm):
    prompt, params = "The opposite of hot is", {"max_tokens": 30, "temperature": 0}
    [plain] = llm.generate(prompt, SamplingParams(**params))
    stop = plain.text[7:12]
    deltas = list(llm.stream(prompt, SamplingParams(stop=stop, **params)))
    text = "".join(delta.text for delta in deltas)
    assert text == plain.text[: plain.text.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == stop


def test_a_schema_holds_at_any_length(llm):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "year": {"type": "integer", "minimum": 1900}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    for max_tokens in (16, 40):
        params = SamplingParams(
            grammar=Grammar.json_schema(schema), max_tokens=max_tokens, n=2, temperature=1.0, seed=4
        )
        [output] = llm.generate("My home, in JSON: ", params)
        for choice in output.choices:
            found = json.loads(choice.text)
            assert isinstance(found["city"], str)
            assert found["year"] >= 1900
