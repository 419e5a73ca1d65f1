"""The programs of `examples/` and of the docs on the real SmolLM2."""

import importlib
import json
import pathlib
import re

import msgspec
import pytest

import jaxserve
from jaxserve import Runtime, set_default_backend
from jaxserve.config import cache_dir

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def runtime():
    if not (cache_dir() / "models" / "smollm2-135m-instruct").exists():
        pytest.fail("the model is not pulled; `make test` does that")
    # as tests/e2e/test_smollm2.py, whose compiled programs these are
    limits = {"max_num_seqs": 8, "max_batched_tokens": 128, "max_model_len": 2048}
    with Runtime(model_path="smollm2-135m-instruct", process="spawn", **limits) as runtime:
        yield runtime


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
