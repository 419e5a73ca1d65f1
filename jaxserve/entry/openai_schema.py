"""OpenAI's request bodies, with every field checked; `openai_answers` has what answers them.

Imports no jax.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import FailFast, Field

from jaxserve.entry.body_fields import (
    MAX_PROMPTS,
    BadWords,
    Body,
    LogitBias,
    Prompt,
    Stop,
    TokenIds,
    only,
    sampling_params,
)
from jaxserve.entry.search import is_search
from jaxserve.entry.structured import grammar_of
from jaxserve.types import (
    ALL_LOGPROBS,
    MAX_LOGPROBS,
    InvalidRequest,
    LogprobsMode,
    SamplingParams,
    parse_json,
)

COMPLETION_MAX_TOKENS = 16
"""Tokens of a completion that doesn't say how many; a chat answer goes on until the context is
full.
"""
STRUCTURED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields of which one may ask for structured output."""


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """A JSON schema."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


JSON_SCHEMA = {"type": ["object", "boolean"]}
TEXT = {"type": "string"}
STRUCTURES = {
    "structures": {
        "type": "array",
        "minItems": 1,
        "items": _object(["begin"], begin=TEXT, schema=JSON_SCHEMA, end=TEXT),
    },
    "triggers": {"type": "array", "minItems": 1, "items": {**TEXT, "minLength": 1}},
}
# Named with `type`: before Python 3.12.2 what is annotated with a dict can't stand in a union.
type ResponseFormat = Annotated[
    dict[str, Any],
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                _object(["type"], type={"enum": ["text", "json_object"]}),
                _object(
                    ["type", "json_schema"],
                    type={"const": "json_schema"},
                    json_schema=_object(
                        ["schema"],
                        name=TEXT,
                        description=TEXT,
                        schema=JSON_SCHEMA,
                        strict={"type": "boolean"},
                    ),
                ),
                _object(["type", *STRUCTURES], type={"const": "structural_tag"}, **STRUCTURES),
            ]
        }
    ),
]
type StructuredOutputs = Annotated[
    dict[str, Any],
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                _object(["json"], json=JSON_SCHEMA),
                _object(["regex"], regex=TEXT),
                _object(["choice"], choice={"type": "array", "minItems": 1, "items": TEXT}),
                _object(["grammar"], grammar=TEXT),
                _object(["json_object"], json_object={"const": True}),
                _object(["structural_tag"], structural_tag=_object([*STRUCTURES], **STRUCTURES)),
            ]
        }
    ),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: usage so far in every chunk."
    )
    include_obfuscation: only(False) = None  # pyright: ignore[reportInvalidTypeForm]


class SamplingBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="Name of the model; not given: the one served.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    temperature: float | None = Field(None, description="0 is greedy. 0 to 2.")
    top_p: float | None = Field(None, description="Keep tokens whose probabilities sum to this.")
    n: int | None = Field(None, description="Choices for the prompt.")
    stop: Stop = ()
    seed: int | None = Field(None, description="Same seed, same prompt: same tokens.")
    presence_penalty: float | None = Field(None, description="Off logits of tokens generated.")
    frequency_penalty: float | None = Field(
        None, description="Off a token's logit for each time that it was generated."
    )
    logit_bias: LogitBias | None = Field(None, description="Added to the logits of token ids.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Named in the request's log line.")
    # Extensions, with vLLM's names.
    top_k: int | None = Field(None, description="Keep the k likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(
        None, description="Drop tokens less likely than this times the likeliest."
    )
    min_tokens: int | None = Field(None, description="No end before this many tokens.")
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-text token.")
    stop_token_ids: TokenIds | None = Field(None, description="Generation ends at any of these.")
    repetition_penalty: float | None = Field(
        None, description="Divides logits of tokens in prompt and output; 1: none."
    )
    typical_p: float | None = Field(None, description="Locally typical sampling; 1: off.")
    no_repeat_ngram_size: int | None = Field(
        None, description="No run of this many tokens comes twice."
    )
    allowed_token_ids: TokenIds | None = Field(None, description="Only these are sampled.")
    bad_words: BadWords | None = Field(
        None, description="Texts, or runs of token ids, that the output never has."
    )
    prompt_logprobs: int | None = Field(
        None,
        description=f"Log-probabilities of the prompt's tokens and of their likeliest "
        f"alternatives, 0 to {MAX_LOGPROBS}, {ALL_LOGPROBS} for all; not with stream.",
    )
    prompt_logprobs_start: int | None = Field(
        None, description="With prompt_logprobs: of the tokens after this one only."
    )
    token_ids_logprob: TokenIds | None = Field(
        None, description="Log-probabilities of these tokens at each place."
    )
    logprobs_mode: LogprobsMode | None = Field(
        None, description="Whether of the model's own distribution, or of what is sampled from."
    )
    # Structured output; one of these at the most. `structured` reads them.
    response_format: ResponseFormat | None = Field(
        None, description="type: text, json_object, json_schema or structural_tag."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    )
    guided_json: dict[str, Any] | bool | str | None = Field(None, description="A JSON schema.")
    guided_regex: str | None = Field(None, description="The text matches this as a whole.")
    guided_choice: list[str] | None = Field(None, description="The text is one of these.")
    guided_grammar: str | None = Field(None, description="Lark or EBNF.")
    best_of: int | None = Field(
        None, description="Choices to generate, of which the n likeliest are returned."
    )
    stop_regex: Stop = ()
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string at the end of the text."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; true when not given."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Spaces that the tokenizer puts there; none of those served does."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep this many of the prompt's last tokens; -1: what fits."
    )
    stream_interval: int | None = Field(None, description="Stream this many tokens at a time.")
    priority: int | None = Field(
        None, description="Lower runs first; needs the server's policy 'priority'."
    )
    use_beam_search: bool | None = Field(None, description="Search with best_of beams.")
    length_penalty: float | None = Field(None, description="Of beam search.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Of beam search.")
    cache_salt: str | None = Field(
        None, description="Computed prefixes are shared with requests of the same salt only."
    )
    default_max_tokens: ClassVar[int | None] = None
    """Where max_tokens is not given; None: until the context is full."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def _sampling(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        **more: Any,
    ) -> SamplingParams:
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options", "is only allowed when stream is true")
            if self.stream_options.continuous_usage_stats and not self.include_usage:
                raise InvalidRequest("stream_options.continuous_usage_stats", "needs include_usage")
        if self.stream_interval is not None and not self.stream:
            raise InvalidRequest("stream_interval", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "is not allowed when stream is true")
        params = sampling_params(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=self.prompt_logprobs_start,
            token_ids_logprob=self.token_ids_logprob,
            logprobs_mode=self.logprobs_mode,
            n=self.n,
            grammar=grammar_of({name: getattr(self, name) for name in STRUCTURED}),
            **{name: getattr(self, name) for name in TEXT_FIELDS},
            **more,
        )
        if self.stream and is_search(params):
            field = "use_beam_search" if params.use_beam_search else "best_of"
            raise InvalidRequest(
                field, "can't be streamed: what is best is known at the end; allowed: stream false"
            )
        return params


TEXT_FIELDS = (
    "best_of", "stop_regex", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "stream_interval",
    "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip
"""Of a body and of SamplingParams: what concerns text and choices, not the device."""


class CompletionRequest(SamplingBody):
    default_max_tokens: ClassVar[int | None] = COMPLETION_MAX_TOKENS

    prompt: Prompt
    logprobs: int | None = Field(
        None,
        description=f"Likeliest tokens to report, 0 to {MAX_LOGPROBS}; {ALL_LOGPROBS}: all.",
    )
    echo: bool | None = Field(
        None, description="Begin the text with the prompt, and its log-probabilities."
    )
    suffix: only("") = None  # pyright: ignore[reportInvalidTypeForm]

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        prompt_logprobs = self.prompt_logprobs
        if self.echoes_logprobs:
            if prompt_logprobs not in (None, self.logprobs):
                raise InvalidRequest(
                    "prompt_logprobs", "differs from logprobs, which with echo are the prompt's too"
                )
            if self.prompt_logprobs_start:
                raise InvalidRequest("prompt_logprobs_start", "can't be given with echo")
            if self.stream and (self.n or 1) > 1:
                # The first choice scores the prompt; the others may be told before that is known.
                raise InvalidRequest("n", f"is {self.n}; allowed with stream, echo, logprobs: 1")
            prompt_logprobs = self.logprobs
        params = self._sampling(self.max_tokens, self.logprobs, prompt_logprobs, echo=self.echo)
        if len(self.prompt) * params.n > MAX_PROMPTS:
            raise InvalidRequest(
                "n", f"is {params.n} for {len(self.prompt)} prompts; allowed: {MAX_PROMPTS} in all"
            )
        return params


class TextPart(Body):
    type: Literal["text"]
    text: str


type TextParts = Annotated[list[TextPart], FailFast()]


class FunctionCall(Body):
    name: str
    arguments: str
    """JSON."""


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionSpec(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


type Tools = Annotated[list[Tool], FailFast()]


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="An assistant's thinking, as it was.")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, description="Of the call that a tool's message answers.")
    refusal: only() = None  # pyright: ignore[reportInvalidTypeForm]
    audio: only() = None  # pyright: ignore[reportInvalidTypeForm]
    annotations: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    function_call: only() = None  # pyright: ignore[reportInvalidTypeForm]

    def template_message(self, where: str = "message") -> dict[str, Any]:
        """The message as chat templates expect it; `developer` is the newer name of `system`.

        Raises: InvalidRequest naming what is wrong with the message at `where`.
        """
        content = self.content
        if content is None:
            if self.role != "assistant" or not (self.tool_calls or self.reasoning_content):
                raise InvalidRequest(f"{where}.content", "is missing; allowed: text")
            content = ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        for field, owner in (
            ("reasoning_content", "assistant"), ("tool_calls", "assistant"),
            ("tool_call_id", "tool"),
        ):  # fmt: skip
            if getattr(self, field) and self.role != owner:
                raise InvalidRequest(f"{where}.{field}", f"is only allowed of role {owner}")
        if self.role == "tool":
            if not self.tool_call_id:
                raise InvalidRequest(f"{where}.tool_call_id", "is missing; allowed: a call's id")
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(call, f"{where}.tool_calls[{i}].function.arguments")
                for i, call in enumerate(self.tool_calls)
            ]
        return message


class CallIds:
    """The calls of a conversation, which its tools' messages answer."""

    def __init__(self):
        self._ids: set[str | None] = set()

    def take(self, message: dict[str, Any], field: str) -> None:
        """The next message, as chat templates expect it. Raises: InvalidRequest naming `field` for
        an answer to no call; where a call has no id, any may be its answer.
        """
        self._ids |= {call["id"] for call in message.get("tool_calls", ())}
        answered = message.get("tool_call_id")
        if answered is not None and not {answered, None} & self._ids:
            raise InvalidRequest(field, f"is {answered[:60]!r}, the id of no call before it")


def template_call(call: ToolCall, field: str) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates write as JSON; `field` names
    them in errors.
    """
    arguments = parse_json(call.function.arguments or "{}", field)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatRequest(SamplingBody):
    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description=f"0 to {MAX_LOGPROBS}; {ALL_LOGPROBS}: all.")
    metadata: dict[str, str] | None = Field(None, description="Accepted; has no effect.")
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted; every prefix is cached without it."
    )
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: the answer ends with its first call; no effect without tools."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables for the model's chat template."
    )
    separate_reasoning: bool | None = Field(
        None, description="false: the model's thinking stays where it is, in the content."
    )
    include_reasoning: bool | None = Field(None, description="false: it is left out.")
    functions: only([]) = None  # pyright: ignore[reportInvalidTypeForm]
    function_call: only("none", "auto") = None  # pyright: ignore[reportInvalidTypeForm]
    modalities: only(["text"]) = None  # pyright: ignore[reportInvalidTypeForm]
    audio: only() = None  # pyright: ignore[reportInvalidTypeForm]
    prediction: only() = None  # pyright: ignore[reportInvalidTypeForm]
    reasoning_effort: only() = None  # pyright: ignore[reportInvalidTypeForm]
    verbosity: only("medium") = None  # pyright: ignore[reportInvalidTypeForm]
    web_search_options: only() = None  # pyright: ignore[reportInvalidTypeForm]
    store: only(False) = None  # pyright: ignore[reportInvalidTypeForm]
    service_tier: only("auto", "default") = None  # pyright: ignore[reportInvalidTypeForm]
    echo: only(False) = None  # pyright: ignore[reportInvalidTypeForm]
    add_generation_prompt: only(True) = None  # pyright: ignore[reportInvalidTypeForm]
    continue_final_message: only(False) = None  # pyright: ignore[reportInvalidTypeForm]
    add_special_tokens: only(False) = None  # pyright: ignore[reportInvalidTypeForm]
    chat_template: only() = None  # pyright: ignore[reportInvalidTypeForm]

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        max_tokens = self.max_tokens
        if self.max_completion_tokens is not None:
            if max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    "max_completion_tokens", "differs from max_tokens, its older name"
                )
            max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only allowed when logprobs is true")
        most = MAX_LOGPROBS
        if self.top_logprobs is not None and not ALL_LOGPROBS <= self.top_logprobs <= most:
            raise InvalidRequest(
                "top_logprobs",
                f"is {self.top_logprobs}; allowed: 0 to {most}, or {ALL_LOGPROBS} for all",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(max_tokens, logprobs, self.prompt_logprobs)

    @property
    def field_names(self) -> dict[str, str]:
        """What this body calls fields that go by another name inside."""
        is_newer = self.max_tokens is None and self.max_completion_tokens is not None
        newer = {"max_tokens": "max_completion_tokens"} if is_newer else {}
        return {"prompt": "messages", **newer}

    def template_messages(self) -> list[dict[str, Any]]:
        """Raises: InvalidRequest naming the message that is wrong."""
        messages = [
            message.template_message(f"messages[{i}]") for i, message in enumerate(self.messages)
        ]
        calls = CallIds()
        for i, message in enumerate(messages):
            calls.take(message, f"messages[{i}].tool_call_id")
        return messages

    def template_variables(self) -> dict[str, Any]:
        """Raises: InvalidRequest for one that is not the client's to set."""
        variables = self.chat_template_kwargs or {}
        for name in ("messages", "tools", "documents", "add_generation_prompt", "self"):
            if name in variables:
                raise InvalidRequest("chat_template_kwargs", f"has {name!r}, which is set already")
        return variables

    def template_tools(self) -> list[dict[str, Any]]:
        """Raises: InvalidRequest for two tools of one name."""
        tools: list[dict[str, Any]] = []
        for tool in self.tools or ():
            function = {name: value for name, value in tool.function if value is not None}
            tools.append({"type": "function", "function": function})
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", "has two functions of one name")
        return tools

    def chosen_tool(self) -> Literal["none", "auto", "required"] | tuple[str]:
        """`tool_choice` decided. Raises: InvalidRequest for a tool that there isn't."""
        choice, names = self.tool_choice, {tool.function.name for tool in self.tools or ()}
        if choice is None:
            return "auto"
        if isinstance(choice, str):
            if choice == "required" and not names:
                raise InvalidRequest("tool_choice", "is 'required', and there are no tools")
            return choice
        if choice.function.name not in names:
            name = choice.function.name
            raise InvalidRequest("tool_choice", f"names {name!r}, which is none of the tools")
        return (choice.function.name,)


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str = Field(description="Text to tokenize.")
    add_special_tokens: bool = Field(True, description="Put the model's special tokens around it.")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
