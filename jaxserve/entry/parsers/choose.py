"""Which parsers a model's answers need, and both kinds in a row. Imports no jax."""

from collections.abc import Callable, Collection
from typing import Protocol

from jaxserve.entry.parsers.parser import Content, Event, Parser
from jaxserve.entry.parsers.reasoning.deepseek_r1 import DeepSeekR1
from jaxserve.entry.parsers.reasoning.qwen3 import Qwen3
from jaxserve.entry.parsers.tool_calls.deepseek import BEGIN as DEEPSEEK_BEGIN
from jaxserve.entry.parsers.tool_calls.deepseek import DeepSeek
from jaxserve.entry.parsers.tool_calls.hermes import Hermes
from jaxserve.entry.parsers.tool_calls.llama3_json import Llama3Json
from jaxserve.entry.parsers.tool_calls.mistral import Mistral
from jaxserve.entry.parsers.tool_calls.pythonic import Pythonic

TOOL_CALLS: dict[str, Callable[[Collection[str]], Parser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek": DeepSeek,
}
REASONING: dict[str, Callable[[str], Parser]] = {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3}

TOOL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    (DEEPSEEK_BEGIN, "deepseek"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
"""What a chat template that teaches a format has in it."""


def tool_format(setting: str, template: str) -> str | None:
    """The name of the tool-call parser: the setting, or for "auto" what the template tells."""
    if setting != "auto":
        return None if setting == "none" else setting
    return next((name for mark, name in TOOL_MARKS if mark in template), None)


def reasoning_format(setting: str, template: str, model_type: str) -> str | None:
    """The name of the reasoning parser, likewise."""
    if setting != "auto":
        return None if setting == "none" else setting
    if "</think>" not in template:
        return None
    is_optional = "enable_thinking" in template or model_type.startswith("qwen3")
    return "qwen3" if is_optional else "deepseek_r1"


class TextParser(Protocol):
    """What `is_cut`, `push` and `finish` of a Parser are."""

    @property
    def is_cut(self) -> bool: ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class Chain:
    """Thinking first; tool calls in what comes after it."""

    def __init__(self, reasoning: TextParser, tools: TextParser):
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_cut(self) -> bool:
        return self._tools.is_cut

    def push(self, text: str) -> list[Event]:
        return self._through(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        return [*self._through(self._reasoning.finish()), *self._tools.finish()]

    def _through(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return found


class Plain:
    """All is content."""

    is_cut = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
