"""The real SmolLM2-135M-Instruct: through the Python API, against what transformers generates from
the same file; and the programs of `examples/` and of the docs on it. One engine, which is dear."""

import importlib
import json
import pathlib
import re

import msgspec
import pytest

import jaxserve
from jaxserve import LLM, Grammar, Runtime, SamplingParams, set_default_backend
from jaxserve.config import cache_dir

FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures" / "smollm2_greedy.json"
TIE = 1e-3
"""Leads of the best logit over the second below this are ties: float32 in another order may swap
them."""

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def runtime():
    if not (cache_dir() / "models" / "smollm2-135m-instruct").exists():
        pytest.fail("the model is not pulled; `make test` does that")
    limits = {"max_num_seqs": 8, "max_batched_tokens": 128, "max_model_len": 2048}
    with Runtime(model_path="smollm2-135m-instruct", process="spawn", **limits) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def llm(runtime):
    """The same engine's."""
    llm = LLM.__new__(LLM)
    llm._client, llm._loop, llm._finalizer = runtime.client, runtime.loop, runtime._finalizer
    return llm


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


def run(name, runtime, **changes):
    module = importlib.import_module(f"examples.{name}")
    items = [{**item, **changes} for item in module.ITEMS]
    return getattr(module, name).run_batch(items, backend=runtime, temperature=0)


def test_json_output(runtime):
    [state] = run("json_output", runtime)
    assert set(json.loads(state["json"])) == {"name", "age", "city"}


def test_few_shot(runtime):
    [state] = run("few_shot", runtime)
    assert "Italy: Rome, Europe" in state.returned
    assert "Egypt: Cairo, Africa" in state.returned
    assert len(state.returned) == 8


def test_tree_of_thought(runtime):
    [state] = run("tree_of_thought", runtime, width=2, depth=2)
    assert isinstance(state["answer"], int)
    assert len(state["step"]) == 2
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", *["user", "assistant"] * 3]


def test_tool_agent(runtime):
    apples, _ = run("tool_agent", runtime)
    assert "12 apples" in apples.returned
    assert json.loads(apples.messages()[-3]["content"]) == {"tool": "in_stock", "fruit": "apples"}


def test_chat(runtime):
    [state] = run("chat", runtime)
    answers = [m["content"] for m in state.messages() if m["role"] == "assistant"]
    assert "Paris" in answers[0]
    assert len(answers) == 3
    assert len(re.findall(r"<\|im_start\|>assistant", state.text())) == 3


@pytest.mark.parametrize("page", ["docs/lang.md", "README.md"])
def test_the_docs_programs_word_for_word(runtime, monkeypatch, page):
    generate = runtime.generate
    made = []

    def make(model_path):
        made.append(model_path)
        return runtime

    def seeded(token_ids, params, on_text):
        return generate(token_ids, msgspec.structs.replace(params, seed=1), on_text)

    monkeypatch.setattr(runtime, "generate", seeded)
    monkeypatch.setattr(jaxserve, "Runtime", make, raising=False)
    text = (pathlib.Path(__file__).parents[2] / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    known = {}
    try:
        for block in blocks:
            if page != "README.md" or "@function" in block:
                exec(block, known)
    finally:
        set_default_backend(None)
    assert made == ["smollm2-135m-instruct"]
    if page == "README.md":
        assert "Paris" in known["states"][0]["city"]
        return
    assert set(json.loads(known["json_output"].run(backend=runtime)["json"])) == {
        "name", "age", "city"
    }  # fmt: skip
    assert known["state"]["word"]
