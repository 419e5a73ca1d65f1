"""The bodies of /v1/responses, and what they are to the chat template. Imports no jax."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxserve.entry import openai_schema as schema
from jaxserve.entry.body_fields import Body, Stop, only, sampling_params
from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.types import Grammar, InvalidRequest, SamplingParams

FIELD_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""What /v1/responses calls fields that go by another name inside."""


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    logprobs: only([]) = None  # pyright: ignore[reportInvalidTypeForm]


type InputTexts = Annotated[list[InputText], FailFast()]
ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
"""What an item of each type has, beside id and status."""


class InputItem(Body):
    """A message, a tool call, a tool's answer or a piece of thinking, by its `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | InputTexts | None = None
    id: str | None = Field(None, description="Accepted; has no effect.")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        None, description="Accepted; has no effect."
    )
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: only([]) = None  # pyright: ignore[reportInvalidTypeForm]

    def template_message(self, where: str) -> dict[str, Any]:
        """The item as chat templates expect it. Raises: InvalidRequest naming what is wrong with
        the item at `where`.
        """
        fields = ITEM_FIELDS[self.type]
        for name, value in self:
            if value is not None and name not in ("type", "id", "status", *fields):
                raise InvalidRequest(f"{where}.{name}", f"is not a field of a {self.type}")

        def need(name: str) -> Any:
            value = getattr(self, name)
            if value is None:
                raise InvalidRequest(f"{where}.{name}", f"is missing in a {self.type}")
            return value

        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        match self.type:
            case "message":
                role = need("role")
                need("content")
                return {"role": "system" if role == "developer" else role, "content": content}
            case "function_call":
                function = schema.FunctionCall(name=need("name"), arguments=need("arguments"))
                call = schema.ToolCall(id=need("call_id"), function=function)
                calls = [schema.template_call(call, f"{where}.arguments")]
                return {"role": "assistant", "content": "", "tool_calls": calls}
            case "function_call_output":
                return {"role": "tool", "content": need("output"), "tool_call_id": need("call_id")}
            case "reasoning":
                return {"role": "assistant", "content": "", "reasoning_content": content}


type InputItems = Annotated[list[InputItem], FailFast()]


class FlatTool(Body):
    """A function, with its fields beside its type."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


type FlatTools = Annotated[list[FlatTool], FailFast()]


class FlatChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """As response_format elsewhere, with a schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="A schema is kept to whether strict or not.")


class Text(Body):
    format: TextFormat | None = None
    verbosity: only("medium") = None  # pyright: ignore[reportInvalidTypeForm]


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    input: str | InputItems
    model: str | None = None
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: FlatTools | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = Field(None, description="The conversation to go on with.")
    store: bool | None = Field(None, description="Keep the answer; true when not given.")
    background: bool | None = Field(None, description="Answer at once; the work goes on.")
    stream: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Given back with the answer.")
    user: str | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = ()
    include: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    text: Text | None = Field(None, description="What the answer's text must look like.")
    reasoning: only({}) = None  # pyright: ignore[reportInvalidTypeForm]
    truncation: only("disabled") = None  # pyright: ignore[reportInvalidTypeForm]
    top_logprobs: only(0) = None  # pyright: ignore[reportInvalidTypeForm]
    max_tool_calls: only() = None  # pyright: ignore[reportInvalidTypeForm]
    prompt: only() = None  # pyright: ignore[reportInvalidTypeForm]
    conversation: only() = None  # pyright: ignore[reportInvalidTypeForm]
    service_tier: only("auto", "default") = None  # pyright: ignore[reportInvalidTypeForm]
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted; every prefix is cached without it."
    )

    def sampling(self) -> SamplingParams:
        """Raises: InvalidRequest naming the field."""
        fields = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
        return sampling_params(
            max_tokens=self.max_output_tokens,
            grammar=self.grammar(),
            **{name: getattr(self, name) for name in fields},
        )

    def grammar(self) -> Grammar | None:
        """Of `text.format`. Raises: InvalidRequest."""
        wanted = self.text and self.text.format
        if wanted is None:
            return None
        if wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise InvalidRequest("text.format.schema", "is not given; allowed: a JSON schema")
            return Grammar.json_schema(wanted.schema_, "text.format.schema")
        for name, value in wanted:
            if name != "type" and value is not None:
                field = f"text.format.{name.rstrip('_')}"
                raise InvalidRequest(field, "is for type json_schema only")
        return Grammar.json_object("text.format") if wanted.type == "json_object" else None

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools as /v1/chat/completions has them. Raises: InvalidRequest."""
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", "has two functions of one name")
        return [
            {
                "type": "function",
                "function": {k: v for k, v in tool if k != "type" and v is not None},
            }
            for tool in self.tools or ()
        ]

    def chosen_tool(self) -> Any:
        """As `ChatRequest.chosen_tool`. Raises: InvalidRequest."""
        choice, names = self.tool_choice, {tool.name for tool in self.tools or ()}
        if isinstance(choice, FlatChoice):
            if choice.name not in names:
                raise InvalidRequest("tool_choice", f"names {choice.name!r}, none of the tools")
            return (choice.name,)
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice", "is 'required', and there are no tools")
        return choice or "auto"

    def continued(
        self, before: Sequence[dict[str, Any]], template: ChatTemplate | None
    ) -> list[dict[str, Any]]:
        """`before` and what `input` adds to it, for the chat template. Raises: InvalidRequest."""
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequest("input", "is empty; allowed: text, or one item or more")
        calls, messages = schema.CallIds(), [*before]
        for message in before:
            calls.take(message, "previous_response_id")
        for i, item in enumerate(self.input):
            message = item.template_message(f"input[{i}]")
            calls.take(message, f"input[{i}].call_id")
            if template is not None:
                template.check_message(message, f"input[{i}].type", f"input[{i}].type")
            messages.append(message)
        return merge_assistant(messages)


def merge_assistant(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Thinking, text and calls of one turn are items of their own here, one message there."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is None or (before["role"], message["role"]) != ("assistant", "assistant"):
            merged.append(message)
            continue
        joined = {**before, **message, "content": before["content"] + message["content"]}
        calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
        if calls:
            joined["tool_calls"] = calls
        merged[-1] = joined
    return merged
