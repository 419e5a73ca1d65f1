"""An agent that calls tools by JSON until it has its answer: python -m examples.tool_agent"""

import json

from examples.command import main
from jaxserve import assistant, function, gen, system, user

STOCK = {"apples": 12, "pears": 7, "plums": 30}
TOOLS = {
    "in_stock": lambda fruit: STOCK[fruit],
    "add": lambda a, b: a + b,
}


def call_of(tool, **arguments):
    """The schema of a call."""
    return {
        "type": "object",
        "properties": {"tool": {"const": tool}, **arguments},
        "required": ["tool", *arguments],
        "additionalProperties": False,
    }


NUMBER = {"type": "integer", "minimum": 0, "maximum": 1000}
ANSWER = call_of("answer", text={"type": "string", "maxLength": 60})
CALL = {
    "anyOf": [
        call_of("in_stock", fruit={"enum": list(STOCK)}),
        call_of("add", a=NUMBER, b=NUMBER),
        ANSWER,
    ]
}
RULES = """You answer questions about a shop by calling tools, one JSON object at a time:
{"tool": "in_stock", "fruit": ...} tells how many there are of apples, pears or plums
{"tool": "add", "a": ..., "b": ...} adds two numbers
{"tool": "answer", "text": ...} gives the answer, once you have it"""
SHOWN = [
    ("How many plums are there?", '{"tool": "in_stock", "fruit": "plums"}'),
    ("Result: 30", '{"tool": "answer", "text": "There are 30 plums."}'),
    ("How many pears and plums are there together?", '{"tool": "in_stock", "fruit": "pears"}'),
    ("Result: 7", '{"tool": "in_stock", "fruit": "plums"}'),
    ("Result: 30", '{"tool": "add", "a": 7, "b": 30}'),
    ("Result: 37", '{"tool": "answer", "text": "There are 37 together."}'),
]
"""How it is done."""
ITEMS = [
    {"question": "How many apples are there?", "max_calls": 5},
    {"question": "How many apples and pears are there together?", "max_calls": 5},
]


@function
def tool_agent(s, question, max_calls):
    """Calls tools until it answers, the last time whatever it knows."""
    s += system(RULES)
    for said, call in SHOWN:
        s += user(said) + assistant(call)
    s += user(question)
    for number in range(max_calls):
        is_last = number == max_calls - 1
        schema = ANSWER if is_last else CALL
        s += assistant(gen("call", max_tokens=60, json_schema=schema, temperature=0))
        call = json.loads(s["call"])
        tool = call.pop("tool")
        if tool == "answer":
            return call["text"]
        s += user(f"Result: {TOOLS[tool](**call)}")


if __name__ == "__main__":
    main(tool_agent, ITEMS, lambda state: state.text().split(SHOWN[-1][1])[1])
