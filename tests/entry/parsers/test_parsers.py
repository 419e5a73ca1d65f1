"""Each parser on texts as its models write them; however a text is cut, it says the same."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.entry.chat_format import Message
from jaxserve.entry.parsers.choose import (
    REASONING,
    TOOL_CALLS,
    Chain,
    reasoning_format,
    tool_format,
)
from jaxserve.entry.parsers.parser import CallArguments, CallStart, Content, Reasoning
from jaxserve.entry.parsers.tool_calls.constrained import Arguments, CallList, grammar_for_tools

NAMES = ("get_weather", "add", "f")
WEATHER = {"city": 'Köln {"a"}', "days": [1, 2, {"x": None}]}
W = json.dumps(WEATHER, ensure_ascii=False)
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

TWO = [("get_weather", WEATHER), ("add", {"a": -1.5, "b": True})]
ONE = TWO[:1]
AB = '{"a": -1.5, "b": true}'
CASES: list[tuple[str, str, str, list]] = [
    # (parser, text, content, calls)
    ("hermes", "Just text, a < b and <tool> tags.\n", "Just text, a < b and <tool> tags.\n", []),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>', "", ONE),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {AB}, "id": 7, "name": "add"}}</tool_call>\n',
        "Let me see.", TWO,
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", {"a": 1})]),
    ("hermes", "<tool_call>not json</tool_call> rest", "<tool_call>not json</tool_call> rest", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "add"}', "",
     [("f", {}), ("add", {})]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {W}}}', "", ONE),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {W}}}; '
     f'{{"name": "add", "parameters": {AB}}}', "", TWO),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}',
     []),
    ("llama3_json", ' {"answer": [1, 2]} \n', ' {"answer": [1, 2]} \n', []),
    ("llama3_json", "Hi {you}", "Hi {you}", []),
    ("llama3_json", "<|python_tag|>print(1)", "print(1)", []),
    ("llama3_json", '{"name": "f', '{"name": "f', []),
    ("llama3_json", "", "", []),
    ("pythonic", "[f(a=1, b='x]\\'y', c=[True, None, {'k': 2.5}], d=false)]", "",
     [("f", {"a": 1, "b": "x]'y", "c": [True, None, {"k": 2.5}], "d": False})]),
    ("pythonic", "<|python_start|>[f(), add(a=-1.5, b=true)]<|python_end|>", "",
     [("f", {}), ("add", {"a": -1.5, "b": True})]),
    ("pythonic", "1<|python_start|>[f()]", "1<|python_start|>[f()]", []),
    ("pythonic", " <|python_start|> Hm [f()]", "  Hm [f()]", []),
    ("pythonic", "[f()] a b<|python_end|><|python_end|><|python_end|> \n", " a b", [("f", {})]),
    ("pythonic", "[f\\\n()]", "[f\\\n()]", []),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("pythonic", "[nobody(a=1)] hm", "[nobody(a=1)] hm", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
    ("pythonic", "[f(a=", "[f(a=", []),
    ("pythonic", "Hello (world)", "Hello (world)", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {W}}}, '
     f'{{"name": "add", "arguments": {AB}}}]', "", TWO),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{AB}",
     "Sure.", TWO),
    ("mistral", f"[TOOL_CALLS]get_weather{W}", "", ONE),
    ("mistral", "No [TOOL here", "No [TOOL here", []),
    ("deepseek", f"Hm.{CALLS}{CALL}function{SEP}get_weather\n```json\n{W}\n```{CALL_END}\n{CALL}"
     f"function{SEP}add\n```json\n{AB}\n```{CALL_END}{CALLS_END}", "Hm.", TWO),
    ("deepseek", f"{CALLS}{CALL}get_weather{SEP}{W}{CALL_END}{CALL}add{SEP}{AB}{CALL_END}"
     f"{CALLS_END}", "", TWO),
    ("deepseek", "Text < with ｜ signs", "Text < with ｜ signs", []),
]  # fmt: skip


def say(parser, pieces):
    """(reasoning, content, calls) of a text in pieces."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    reasoning = content = ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case Reasoning(text):
                assert text
                reasoning += text
            case Content(text):
                assert text
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return reasoning, content, calls


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_what_models_write(name, text, content, calls):
    for pieces in ([text], list(text)):
        _, told, found = say(TOOL_CALLS[name](NAMES), pieces)
        assert told == content
        assert [(call, json.loads(arguments)) for call, arguments in found] == calls


@settings(max_examples=400, deadline=None)
@given(
    case=st.sampled_from(CASES),
    places=st.lists(st.integers(0, 10**6), max_size=8),
    end=st.integers(0, 10**6),
    noise=st.text("<>[]{}()\"'\\,:; \nabf=1｜tool_call/", max_size=6),
    at=st.integers(0, 10**6),
)
def test_any_text_says_the_same_however_it_is_cut(case, places, end, noise, at):
    name, text, _, _ = case
    text = text[: end % (len(text) + 1)] if end % 3 == 0 else text
    at %= len(text) + 1
    text = text[:at] + noise + text[at:]
    whole = say(TOOL_CALLS[name](NAMES), [text])
    assert say(TOOL_CALLS[name](NAMES), cut(text, places)) == whole
    assert say(TOOL_CALLS[name](NAMES), list(text)) == whole


ENDS = [
    # (parser, text): after a ¦ it begins to have whole calls only, or ceases to
    ("hermes", 'Hm <tool_call>{"name": "f", "arguments": {"a": [1]¦}}</tool_call>\n<tool_call¦>'
     '{"arguments": {}, "name": "add¦"}</tool_call> Bye.'),
    ("hermes", '<tool_call>{"name": "f"¦}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""¦}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {"a": "}"¦}}¦; {"name": "add"¦}'),
    ("pythonic", "[f(a=1¦)¦, add(b=')'¦)]"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1¦}}¦, {"name": "add"¦}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1¦}[TOOL_CALLS¦]add[ARGS]{¦}'),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": 1¦}}{CALL_END}{CALL[:-1]}¦{CALL[-1]}add{SEP}{{¦}}'
     f"{CALL_END}{CALLS_END}"),
    ("call list", '[{"name": "f", "arguments": {"a": 1¦}}¦, {"name": "add", "arguments": {¦}}]'),
    ("arguments", ' {"a": {"b": 1}¦} '),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), ENDS)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_text_that_ends_within_a_call_has_not_ended_with_calls(name, text, thinks):
    parsers = {"call list": CallList, "arguments": lambda _: Arguments(["f"]), **TOOL_CALLS}
    flips = [at - i for i, at in enumerate(at for at, c in enumerate(text) if c == "¦")]
    plain = text.replace("¦", "")
    for end in range(len(plain) + 1):
        for pieces in ([plain[:end]], plain[:end]):
            parser = parsers[name](NAMES)
            parser = Chain(REASONING["qwen3"](""), parser) if thinks else parser
            message = Message(parser, lambda: "id")
            for piece in pieces:
                message.push(piece)
            message.finish()
            is_whole = sum(at < end for at in flips) % 2 == 1
            assert message.finish_reason("stop") == ("tool_calls" if is_whole else "stop"), end
            assert message.finish_reason("length") == "length"


THOUGHTS = [
    # (parser, end of the prompt, text, reasoning, content)
    ("deepseek_r1", "<think>\n", "So.\n Then.\n</think>\n\nYes.\n", "So.\n Then.", "Yes.\n"),
    ("deepseek_r1", "", "<think>\nSo.\n</think>\nYes.", "So.", "Yes."),
    ("deepseek_r1", "", "So, and no end", "So, and no end", ""),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "", "<think>\n\n</think>\n\nYes </b>.", "", "Yes </b>."),
    ("qwen3", "", "<think>\nWhy? a < b\n</think>\n\nYes.", "Why? a < b", "Yes."),
    ("qwen3", "<think>\n", "Why?\n</think>\n\nYes.", "Why?", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", " Yes.", "", " Yes."),
    ("qwen3", "", "  Plain", "", "  Plain"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "", "<think>a</thi", "a</thi", ""),
]


@settings(max_examples=150, deadline=None)
@given(case=st.sampled_from(THOUGHTS), places=st.lists(st.integers(0, 10**6), max_size=6))
def test_thinking(case, places):
    name, prompt_end, text, reasoning, content = case
    for pieces in ([text], list(text), cut(text, places)):
        assert say(REASONING[name](prompt_end), pieces) == (reasoning, content, [])


def test_tool_calls_after_thinking_but_not_in_it():
    call = f'<tool_call>{{"name": "get_weather", "arguments": {W}}}</tool_call>'
    text = f"<think>I could {call}</think>\n\nOk.\n{call}"
    for pieces in ([text], list(text)):
        parser = Chain(REASONING["qwen3"](""), TOOL_CALLS["hermes"](NAMES))
        reasoning, content, calls = say(parser, pieces)
        assert reasoning == f"I could {call}"
        assert content == "Ok."
        assert [(name, json.loads(a)) for name, a in calls] == ONE


def test_formats_are_known_by_the_template():
    for template, tools, reasoning in (
        ("{{ '<tool_call>' }}{{ enable_thinking }}</think>", "hermes", "qwen3"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek", "deepseek_r1"),
        ("<|python_tag|>", "llama3_json", None),
        ('"parameters": dictionary of', "llama3_json", None),
        ("<|python_start|>", "pythonic", None),
        ("{{ messages }}", None, None),
    ):
        assert tool_format("auto", template) == tools
        assert reasoning_format("auto", template, "llama") == reasoning
    assert tool_format("none", "[TOOL_CALLS]") is None
    assert tool_format("hermes", "") == "hermes"
    assert reasoning_format("deepseek_r1", "", "llama") == "deepseek_r1"


def test_what_a_grammar_has_brought_about():
    text = f' [{{"name": "get_weather", "arguments": {W}}},{{"name": "add", "arguments": {AB}}}]'
    for pieces in ([text], list(text)):
        _, content, calls = say(CallList(NAMES), pieces)
        assert (content, [(n, json.loads(a)) for n, a in calls]) == ("", TWO)
    assert say(Arguments(["f"]), list(W)) == ("", "", [["f", W]])
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert grammar_for_tools(tools, "f") == {"type": "object"}
    schema = grammar_for_tools(tools, None)
    assert schema["minItems"] == 1
    assert [s["properties"]["name"]["const"] for s in schema["items"]["anyOf"]] == ["f", "g"]


def test_references_of_a_tools_schema_hold_in_the_list_of_calls():
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "all": {"items": [{"$ref": "#/$defs/a"}]}},
        "$defs": {"a": {"type": "string"}},
    }
    function = {"name": "f", "parameters": tree}
    plain = {"type": "function", "function": {"name": "g"}}
    schema = grammar_for_tools([plain, {"type": "function", "function": function}], None)
    found = schema["items"]["anyOf"][1]["properties"]["arguments"]
    assert found["properties"]["next"] == {"$ref": "#/items/anyOf/1/properties/arguments"}
    [item] = found["properties"]["all"]["items"]
    assert item == {"$ref": "#/items/anyOf/1/properties/arguments/$defs/a"}
    assert tree["properties"]["next"] == {"$ref": "#"}, "the request's own is left as it was"
