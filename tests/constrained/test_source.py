"""Grammars as the library reads them, and where it has to be corrected."""

import itertools
import json

import pytest
import tiny_vocabulary

from jaxserve.constrained.compiler import Compiled
from jaxserve.constrained.matcher import leads_to_end
from jaxserve.constrained.source import GrammarError, can_end, without_open_bounds
from jaxserve.constrained.vocabulary import Vocabulary
from jaxserve.types import Grammar


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = tiny_vocabulary.tokenizer()
    return Vocabulary(
        tokenizer.to_json(), sorted(tokenizer.eos_token_ids), tiny_vocabulary.VOCAB_SIZE
    )


def accepts(vocabulary: Vocabulary, grammar: Grammar, text: str) -> bool:
    ids = vocabulary.tokenizer.tokenize_str(text, parse_special=True)
    return leads_to_end(Compiled(grammar, vocabulary).start, ids)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.regex(r"\d{3}-[a-f]+"), ["123-a", "000-fe"], ["12-a", "123-", "123-g"]),
        (Grammar.regex("^(yes|no)$"), ["yes", "no"], ["^yes", "yesno", ""]),
        (Grammar.choice(["a", 'é"\\\n', "ab", "<|end|>x"]), ["a", "ab", 'é"\\\n'], ["b", "abx"]),
        (Grammar.json_object(), ['{"a":[1,{}]}', "{}"], ["[]", "1", '{"a":1,}']),
        (
            Grammar.json_schema({"type": "array", "items": {"enum": ["é", 1]}, "minItems": 1}),
            ['["é",1]', "[1]"],
            ["[]", '["e"]'],
        ),
        (Grammar.json_schema(True), ["1", '"x"', "null", "[]"], ["nul", "{"]),
        (Grammar.grammar('start: "a" NUM\nNUM: /[0-9]+/'), ["a1", "a42"], ["a", "1"]),
        (
            Grammar.grammar('root ::= item ("," item)*\nitem ::= [a-c]+\n  | "(" root ")"\n'),
            ["a", "(a,b),cc"],
            ["(a", "d", ""],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_a_grammar_takes_what_it_says(vocabulary, grammar, good, bad):
    assert [text for text in good if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in bad if accepts(vocabulary, grammar, text)] == []


def test_structural_tags_bind_what_follows_a_trigger_and_nothing_else(vocabulary):
    integers = {"type": "array", "items": {"type": "integer"}}
    tag = {
        "structures": [
            {"begin": "<f=add>", "schema": integers, "end": "</f>"},
            {"begin": "<f=not>", "schema": {"type": "boolean"}, "end": "</f>"},
            {"begin": "<|start|>x:", "schema": {"type": "null"}, "end": ""},
        ],
        "triggers": ["<f=", "<|start|>"],
    }  # fmt: skip
    grammar = Grammar.structural_tag(tag)
    good = ["", "any text\n", "a <f=add>[1,2]</f> b <f=not>true</f>", "<|start|>x:null done"]
    bad = ["a <f=", "<f=add>[1,2]", "<f=add>true</f>", "<f=mul>1</f>", "<|start|>y:null"]
    assert [text for text in good if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in bad if accepts(vocabulary, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("a["), "unclosed character class"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.regex(r"[^\s\S]"), "no text"),
        (Grammar.grammar('start: "a" | x'), "unknown name"),
        (Grammar.grammar("root ::= x"), "not found"),
        (Grammar.grammar('start[temperature=0.5]: "a"'), "temperature"),
        (Grammar.json_schema(False), "no JSON text"),
        (Grammar.json_schema({"type": "foo"}), "foo"),
        (Grammar.json_schema({"enum": []}), "Unsatisfiable"),
        (Grammar.json_schema({"not": {}}), "not"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar.json_schema({"$ref": "#/$defs/none"}), "none"),
        (
            Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}),
            "not",  # what a schema asks of the library doesn't loosen it
        ),
    ],
)
def test_what_cannot_be_followed_says_why(vocabulary, grammar, reason):
    with pytest.raises(GrammarError, match=reason) as caught:
        Compiled(grammar, vocabulary)
    assert len(str(caught.value)) <= 300
    assert "<state>" not in str(caught.value)


def test_white_space_between_the_parts_of_json_is_bounded(vocabulary):
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
    good = ["[1, 2]", "[1,2]", "[\n  1,\n  2\n]"]
    bad = ["[1,  2]", "[1,\n\n2]", "[" + "\n" + " " * 41 + "1]", "[1] ", " [1]"]
    assert [text for text in good if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in bad if accepts(vocabulary, grammar, text)] == []


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS | {"required": []}}}, True),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": ENDLESS}}, True),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": ENDLESS}}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, True),
    ],
)
def test_a_schema_without_end_is_told_from_one_that_may_end(schema, ends):
    assert can_end(schema, schema) == ends


def test_bounds_of_numbers_hold(vocabulary):
    values = [-7.5, -7, -0.25, 0, 0.5, 3, 3.25, 10]
    for low, high in itertools.combinations(values, 2):
        for at_low, at_high in itertools.product([True, False], repeat=2):
            schema = {
                "type": "number",
                "minimum" if at_low else "exclusiveMinimum": low,
                "maximum" if at_high else "exclusiveMaximum": high,
            }
            start = Compiled(Grammar.json_schema(schema), vocabulary).start
            for value in values:
                holds = low <= value <= high
                holds &= (at_low or value != low) and (at_high or value != high)
                ids = vocabulary.tokenizer.tokenize_str(json.dumps(value))
                assert leads_to_end(start, ids) == holds, (schema, value)


def test_bounds_are_moved_only_where_schemas_stand():
    bounds = {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}
    kept = {"enum": [bounds], "const": bounds, "default": bounds}
    assert without_open_bounds(kept) == kept
    integer = bounds | {"type": ["integer", "null"]}
    assert without_open_bounds(integer) == integer
    wide = {"type": "number", "exclusiveMinimum": 3, "maximum": 4}
    assert without_open_bounds(wide) == wide
    moved = without_open_bounds({"properties": {"a": {"anyOf": [bounds]}}})
    assert moved["properties"]["a"]["anyOf"] == [
        {"type": "number", "minimum": 3 + 0.5 / 1024, "maximum": 3.5}
    ]
