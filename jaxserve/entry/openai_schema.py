"""OpenAI's wire format: request bodies with every field checked, and the bodies and chunks that
answer them.

A field is served, or has no effect whatever its value (`user`), or is refused by name unless its
value asks for nothing (`presence_penalty: 0`). A field that isn't named here is an error too.
Imports no jax.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

from jaxserve.entry.chat_format import Message
from jaxserve.entry.failures import HttpFailure, UnsupportedParameter
from jaxserve.entry.search import is_search
from jaxserve.entry.structured import grammar_of
from jaxserve.types import (
    ALL_LOGPROBS,
    MAX_LOGPROBS,
    Choice,
    ChosenLogprob,
    Delta,
    EngineInfo,
    InvalidRequest,
    LogprobsMode,
    RequestOutput,
    SamplingParams,
    Usage,
)

COMPLETION_MAX_TOKENS = 16
"""Tokens of a completion that doesn't say how many; a chat answer goes on until the context is
full.
"""
MAX_PROMPTS = 1024
"""Prompts of one /v1/completions, times its n."""
MAX_ERRORS = 100
STRUCTURED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields of which one may ask for structured output."""
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that can't be; JSON has no infinity."""


# ---- the fields of a request


def only(*allowed: Any) -> Any:
    """The type of a field that is not supported: None and the `allowed` values, which ask for
    nothing, pass.
    """

    def check(value: Any) -> Any:
        for one in (None, *allowed):
            if isinstance(value, bool) == isinstance(one, bool) and value == one:
                return value
        raise PydanticCustomError("unsupported_parameter", "is not supported by this server")

    schema = {"description": "Not supported; a value that asks for nothing is accepted."}
    return Annotated[
        Any,
        pydantic.PlainValidator(check),
        pydantic.WithJsonSchema({**schema, "enum": [None, *allowed]}),
    ]


def check_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or token ids, as a list of prompts.

    Raises: PydanticCustomError naming the first item that doesn't fit.
    """

    def fail(where: str, item: Any, allowed: str) -> PydanticCustomError:
        return PydanticCustomError(
            "prompt_type",
            "{where}is {kind}; allowed: {allowed}",
            {"where": where, "kind": _kind(item), "allowed": allowed},
        )

    def check_ids(ids: list[Any], where: str) -> None:
        for i, token in enumerate(ids):
            if type(token) is not int:
                raise fail(f"{where}item {i} ", token, "token ids")
            if token < 0:
                raise PydanticCustomError(
                    "prompt_type",
                    "{where}item {i} is negative; allowed: token ids",
                    {"where": where, "i": i},
                )

    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fail("", value, "a string, token ids, or a list of either")
    if not value:
        raise PydanticCustomError("prompt_empty", "is empty; allowed: at least one token or prompt")
    if isinstance(value[0], str):
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise fail(f"item {i} ", item, "a string, like the first item")
    elif isinstance(value[0], list):
        for i, item in enumerate(value):
            if not isinstance(item, list):
                raise fail(f"item {i} ", item, "a list of token ids, like the first item")
            check_ids(item, f"item {i}, ")
    else:
        check_ids(value, "")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt_count",
            "has {count} prompts; allowed: at most {most}",
            {"count": len(value), "most": MAX_PROMPTS},
        )
    return value


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


Prompt = Annotated[
    Any,
    pydantic.PlainValidator(check_prompt),
    pydantic.WithJsonSchema(
        {
            "description": "One prompt or several, each as text or as token ids.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                },
            ],
        }
    ),
]


def check_stop(value: Any) -> tuple[str, ...]:
    """Stop strings as a tuple; None is none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise PydanticCustomError("stop_type", "is neither a string nor a list of strings")


Stop = Annotated[
    Any,
    pydantic.PlainValidator(check_stop),
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]


# Named with `type`: before Python 3.12.2 `Annotated[..., FailFast()]` can't stand in a union.
type TokenIds = Annotated[list[int], FailFast()]
type Texts = Annotated[list[str], FailFast()]
type BadWords = Annotated[list[str | TokenIds], FailFast()]


def check_biases(value: Any) -> Any:
    """Token ids as numbers: JSON has only strings for keys."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise PydanticCustomError("logit_bias_key", "has a key that is no token id") from None


LogitBias = Annotated[dict[int, float], pydantic.BeforeValidator(check_biases)]


class Body(pydantic.BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


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
    token_ids_logprob: TokenIds | None = Field(
        None, description="Log-probabilities of these tokens at each place."
    )
    logprobs_mode: LogprobsMode | None = Field(
        None, description="Whether of the model's own distribution, or of what is sampled from."
    )
    # Structured output; one of these at the most. `structured` reads them.
    response_format: dict[str, Any] | None = Field(
        None, description="type: text, json_object, json_schema or structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
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
    # Known elsewhere, not supported yet.
    cache_salt: only() = None  # pyright: ignore[reportInvalidTypeForm]
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
        self, max_tokens: int | None, logprobs: int | None, **more: Any
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
            prompt_logprobs=self.prompt_logprobs,
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


def sampling_params(**given: Any) -> SamplingParams:
    """SamplingParams of the fields that a client set; one that is None takes its default.

    Raises: InvalidRequest naming the field.
    """
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class CompletionRequest(SamplingBody):
    default_max_tokens: ClassVar[int | None] = COMPLETION_MAX_TOKENS

    prompt: Prompt
    logprobs: int | None = Field(
        None,
        description=f"Likeliest tokens to report, 0 to {MAX_LOGPROBS}; {ALL_LOGPROBS}: all.",
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    suffix: only("") = None  # pyright: ignore[reportInvalidTypeForm]

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo", "can't be given with logprobs")
        params = self._sampling(self.max_tokens, self.logprobs, echo=self.echo)
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
                template_call(call, f"{where}.tool_calls[{i}]")
                for i, call in enumerate(self.tool_calls)
            ]
        return message


def template_call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates write as JSON."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        raise InvalidRequest(f"{where}.function.arguments", "is not JSON") from None
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
        None, description="false: at most one call; no effect without tools."
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
        try:
            return self._sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
        except InvalidRequest as error:
            if error.field == "max_tokens" and self.max_tokens is None:
                raise InvalidRequest("max_completion_tokens", error.message) from None
            raise

    def template_messages(self) -> list[dict[str, Any]]:
        """Raises: InvalidRequest naming the message that is wrong."""
        return [
            message.template_message(f"messages[{i}]") for i, message in enumerate(self.messages)
        ]

    def template_variables(self) -> dict[str, Any]:
        """Raises: InvalidRequest for one that is not the client's to set."""
        variables = self.chat_template_kwargs or {}
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
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


def parse[B: Body](kind: type[B], body: bytes) -> B:
    """The request in `body`.

    Raises: HttpFailure for what is no JSON object; InvalidRequest or UnsupportedParameter naming
    the first wrong field.
    """
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # listing a million errors takes seconds
            raise HttpFailure(400, f"{error.error_count()} fields are wrong or unknown") from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # The deepest: where a value may be one of two types, the one that fitted best says why it
        # didn't fit.
        first = max(errors, key=lambda e: len(e["loc"]))
    location = _location(first["loc"])
    message = first["msg"]
    if first["type"] == "json_invalid":
        raise HttpFailure(400, f"the body is not JSON: {message}", "invalid_json")
    if not location:
        raise HttpFailure(400, f"the body is not a JSON object: {message}", "invalid_json")
    if first["type"] == "unsupported_parameter":
        raise UnsupportedParameter(location, message)
    if first["type"] == "extra_forbidden":
        raise InvalidRequest(location, "is not a parameter of this endpoint")
    raise InvalidRequest(location, message)


def _location(parts: Sequence[int | str]) -> str:
    """`messages[0].content` of ("messages", 0, "content"); names of union members are left out."""
    text = ""
    for i, part in enumerate(parts):
        if isinstance(part, int):
            text += f"[{part}]"
        elif part[:1].isupper() and i < len(parts) - 1:
            pass  # a model's name
        elif part not in ("str", "list[TextPart]") and "[" not in part:
            text += f".{part}" if text else part
    return text


# ---- what answers


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def add_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in usages),
        completion_tokens=sum(u.completion_tokens for u in usages),
        cached_tokens=sum(u.cached_tokens for u in usages),
    )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _named_logprobs(token: ChosenLogprob) -> dict[int, float]:
    """{token id: logprob} of token_ids_logprob."""
    return {token_id: _finite(logprob) for _, token_id, logprob in token.named}


def prompt_logprobs_body(
    tokens: Sequence[ChosenLogprob | None] | None,
) -> list[dict[int, dict[str, Any]] | None] | None:
    """vLLM's form: at each token of the prompt {token id: its log-probability and text}."""
    if tokens is None:
        return None

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "decoded_token": text}

    return [
        t
        and {
            **{i: entry(text, logprob) for text, i, logprob in [*t.named, *t.top]},
            t.token_id: entry(t.token, t.logprob),
        }
        for t in tokens
    ]


def _prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs_body(output.prompt_logprobs)}


def completion_logprobs(
    tokens: Sequence[ChosenLogprob] | None, offset: int = 0
) -> dict[str, Any] | None:
    """The older form, of /v1/completions; `offset` is the characters of the tokens before these."""
    if tokens is None:
        return None
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    named = any(t.named for t in tokens)
    return {
        **({"token_ids_logprob": [_named_logprobs(t) for t in tokens]} if named else {}),
        "tokens": [t.token for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [
            {text: _finite(logprob) for text, _, logprob in reversed(t.top)} or None for t in tokens
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[ChosenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None

    def entry(text: str, logprob: float) -> dict[str, Any]:
        # A token that holds part of a character has no text whose bytes would be its own.
        whole = "�" not in text
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": list(text.encode()) if whole else None,
        }

    return {
        "content": [
            {
                **entry(t.token, t.logprob),
                **({"token_ids_logprob": _named_logprobs(t)} if t.named else {}),
                "top_logprobs": [entry(text, logprob) for text, _, logprob in t.top],
            }
            for t in tokens
        ],
        "refusal": None,
    }


class Completion:
    """The bodies and chunks that answer one /v1/completions."""

    kind = "text_completion"

    def __init__(self, id: str, model: str, created: int):
        self.envelope = {"id": id, "object": self.kind, "created": created, "model": model}
        self._offsets: dict[int, int] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer; the choices of prompt i come after those of prompt i - 1."""
        choices = [self._choice(choice, output) for output in outputs for choice in output.choices]
        return {
            **self.envelope,
            "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
            "usage": usage_body(add_usage([output.usage for output in outputs])),
        }

    def _choice(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        """A choice but for its index."""
        return {
            "text": choice.text,
            "logprobs": completion_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **_prompt_logprobs(output),
        }

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """What is streamed for a delta of choice `index`."""
        logprobs = completion_logprobs(delta.logprobs, self._offsets.get(index, 0))
        if delta.logprobs:
            characters = sum(len(t.token) for t in delta.logprobs)
            self._offsets[index] = self._offsets.get(index, 0) + characters
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return [{**self.envelope, "choices": [choice]}]

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        """What is streamed before any text."""
        return []

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, when usage was asked for."""
        return {**self.envelope, "choices": [], "usage": usage_body(usage)}


class ChatCompletion(Completion):
    """The bodies and chunks that answer one /v1/chat/completions."""

    kind = "chat.completion"

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        stream: bool,
        message: Callable[[], Message],
    ):
        """`message`: makes what each choice's text becomes."""
        super().__init__(id, model, created)
        if stream:
            self.envelope["object"] = "chat.completion.chunk"
        self._message = message
        self._messages: dict[int, Message] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**super().body(outputs), **_prompt_logprobs(outputs[0])}

    def _choice(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        message = self._message()
        message.push(choice.text)
        message.finish()
        return {
            "message": message.body(),
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": message.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        return [
            self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
            for index in range(num_choices)
        ]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        message = self._messages.setdefault(index, self._message())
        events = message.push(delta.text)
        if delta.finish_reason is not None:
            events += message.finish()
        deltas = [message.delta(event) for event in events]
        if delta.logprobs and not deltas:
            deltas.append({"content": ""})
        logprobs = [chat_logprobs(delta.logprobs), *[None] * len(deltas)]
        chunks = [self._chunk(index, each, logprobs[i]) for i, each in enumerate(deltas)]
        if delta.finish_reason is not None:
            reason = message.finish_reason(delta.finish_reason)
            more = {"stop_reason": delta.stop_reason}
            chunks.append(self._chunk(index, {}, None, reason, more))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(more or {}),
        }
        return {**self.envelope, "choices": [choice]}


def model_body(name: str, info: EngineInfo, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "max_model_len": info.max_model_len,
    }
