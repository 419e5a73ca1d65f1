"""How one chat's answer is written and read: tools for the template, parsers for the text.

Imports no jax.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.config import ServerConfig
from jaxserve.entry.client import Client, Until
from jaxserve.entry.failures import UnsupportedParameter
from jaxserve.entry.parsers.choose import (
    REASONING,
    TOOL_CALLS,
    Chain,
    Plain,
    TextParser,
    reasoning_format,
    tool_format,
)
from jaxserve.entry.parsers.json_text import JsonValue
from jaxserve.entry.parsers.parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from jaxserve.entry.parsers.reasoning.think_tags import END
from jaxserve.entry.parsers.tool_calls.constrained import Arguments, CallList, grammar_for_tools
from jaxserve.types import Grammar, InvalidRequest, SamplingParams

ToolChoice = Literal["none", "auto", "required"] | tuple[str]
"""Or the name of the tool that must be called."""
PROMPT_END_TOKENS = 16
"""Of a prompt, enough to see whether its template has begun the thinking."""


class ChatFormat:
    """What a chat request's tools and the server's parsers come to."""

    def __init__(
        self,
        client: Client,
        settings: ServerConfig,
        tools: Sequence[dict[str, Any]],
        choice: ToolChoice,
        *,
        separates_reasoning: bool = True,
        has_one_call: bool = False,
    ):
        """`has_one_call`: there is one call at the most (`parallel_tool_calls: false`).

        Raises: InvalidRequest for tools that the model can't be told of, or can't be heard
        calling.
        """
        template = client.tokenizer.chat_template
        source = "" if template is None else template.source
        self._client = client
        self._tools = list(tools) if choice != "none" else []
        self._names = frozenset(tool["function"]["name"] for tool in self._tools)
        self._choice = choice
        self._has_one_call = has_one_call
        self._tool_format = None
        if self._tools:
            self._tool_format = tool_format(settings.tool_call_parser, source)
            if template is not None:
                template.check_tools()
            if self._tool_format is None:
                raise UnsupportedParameter(
                    "tools", "are not supported: the server has no --tool-call-parser for the model"
                )
        self._reasoning_format = None
        if separates_reasoning:
            model_type = client.info.model_type
            self._reasoning_format = reasoning_format(settings.reasoning_parser, source, model_type)

    @property
    def template(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return {"tools": self._tools} if self._tools else {}

    @property
    def id_of_call(self) -> Callable[[], str]:
        """Makes ids of calls; Mistral's templates take nine letters and digits only."""
        if self._tool_format == "mistral":
            return lambda: uuid.uuid4().hex[:9]
        return lambda: f"call_{uuid.uuid4().hex[:24]}"

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """`params` that bring the text which the parsers read, and the calls that were asked for.

        Raises: UnsupportedParameter for a tool_choice that can't be enforced.
        """
        tokenizer = self._client.tokenizer
        if params.grammar is not None and params.grammar.kind != "structural_tag":
            self._reasoning_format = None  # the grammar has the text from its first token on
        shows = (
            self._reasoning_format is not None
            and tokenizer.token_id(END) in tokenizer.special_token_ids
        )
        if self._tools and self._choice == "auto":
            shows = shows or TOOL_CALLS[self._tool_format or ""](()).needs_special_tokens
        if shows:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if self._tools and self._choice != "auto":
            name = None if isinstance(self._choice, str) else self._choice[0]
            most = 1 if self._has_one_call else None
            params = constrain(params, grammar_for_tools(self._tools, name, most))
        return params

    def until(self, prompt: Sequence[int]) -> Callable[[], Until] | None:
        """Makes what says of each choice's text after the prompt that no more of it is wanted; None
        where all of it is.
        """
        if not self._has_one_call or not self._tools or self._choice != "auto":
            return None  # where calls are required a grammar counts them
        parser = self.parsers(prompt)
        return lambda: FirstCall(parser())

    def parsers(self, prompt: Sequence[int]) -> Callable[[], TextParser]:
        """Makes the parser of each choice's text after the prompt."""
        end = self._client.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], False)

        def make() -> TextParser:
            tools: TextParser = Plain()
            if isinstance(self._choice, tuple):
                return Arguments(self._choice)
            if self._tools and self._choice == "required":
                return CallList(self._names)
            if self._tools:
                tools = TOOL_CALLS[self._tool_format or ""](self._names)
            if self._reasoning_format is None:
                return tools
            return Chain(REASONING[self._reasoning_format](end), tools)

        return make


class FirstCall:
    """Told a text piece by piece, says whether it has the whole of a call."""

    def __init__(self, parser: TextParser):
        self._parser = parser
        self._arguments = JsonValue()

    def __call__(self, text: str) -> bool:
        for event in self._parser.push(text):
            match event:
                case CallArguments(0, text):
                    if self._arguments.take(text)[1]:
                        return True
                case CallStart(index) if index:
                    return True
        return False


def constrain(params: SamplingParams, schema: dict[str, Any]) -> SamplingParams:
    """`params` whose text is JSON of this schema. Raises: InvalidRequest beside another grammar."""
    if params.grammar is not None:
        raise InvalidRequest("tool_choice", f"can't be given with {params.grammar.field}")
    return msgspec.structs.replace(params, grammar=Grammar.json_schema(schema, "tool_choice"))


class Message:
    """An assistant's message as its events tell it, whole or piece by piece."""

    def __init__(
        self,
        parser: TextParser,
        id_of_call: Callable[[], str],
        *,
        shows_reasoning: bool = True,
        has_one_call: bool = False,
    ):
        """`has_one_call`: what a text has after its first call is dropped."""
        self._parser = parser
        self._id_of_call = id_of_call
        self._shows_reasoning = shows_reasoning
        self._has_one_call = has_one_call
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        """As OpenAI writes them."""
        self._arguments: list[JsonValue] = []
        """Of the calls."""
        self._whole_calls: set[int] = set()

    def push(self, text: str) -> list[Event]:
        """What is new with this piece; see also `content`, `reasoning` and `calls`."""
        return self._take(self._parser.push(text) if text else [])

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        return self._take(self._parser.finish())

    def _take(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                    if not self._shows_reasoning:
                        continue
                case CallStart(index, name):
                    if self._has_one_call and index:
                        continue
                    function = {"name": name, "arguments": ""}
                    call = {"id": self._id_of_call(), "type": "function", "function": function}
                    self.calls.append(call)
                    self._arguments.append(JsonValue())
                case CallArguments(index, text):
                    if self._has_one_call and index:
                        continue
                    function = self.calls[index]["function"]
                    said = text if function["arguments"] else text.lstrip()
                    function["arguments"] += text
                    if said and self._arguments[index].take(said)[1]:
                        self._whole_calls.add(index)
            kept.append(event)
        return kept

    def is_whole(self, index: int) -> bool:
        """The call's arguments have not been cut off."""
        return index in self._whole_calls

    def finish_reason(self, reason: str) -> str:
        """How the choice ended whose text ended with `reason`: that, where it cut a call off."""
        is_cut = self._parser.is_cut and not self._has_one_call
        is_whole = len(self._whole_calls) == len(self.calls) and not is_cut
        return "tool_calls" if reason == "stop" and self.calls and is_whole else reason

    def body(self) -> dict[str, Any]:
        """The whole message."""
        content = self.content if self.content or not self.calls else None
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._shows_reasoning and self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.calls:
            body["tool_calls"] = self.calls
        return body

    def delta(self, event: Event) -> dict[str, Any]:
        """What is streamed of an event."""
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self.calls[index]["id"], "type": "function"}
                return {"tool_calls": [{**call, "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
