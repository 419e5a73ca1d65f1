"""Messages to the text that a model was trained on, by the checkpoint's own Jinja template, in a
sandbox.

The environment is the one that Hugging Face's templates are written for (trim_blocks,
lstrip_blocks, raise_exception, strftime_now, tojson, loop controls, the `generation` tag), and no
more than it: a template is somebody else's code.
"""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxserve.entry.failures import UnsupportedParameter
from jaxserve.types import CheckpointError, InvalidRequest

MAX_RENDERED_CHARACTERS = 64 << 20


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks an assistant's words for training; here it shows
    what it holds.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
):
    # Jinja's own filter escapes HTML, which a prompt is not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class ChatTemplate:
    """A compiled template with the tokens that it may write."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **tokens: str,
    ):
        """Raises: CheckpointError if the template is no valid Jinja."""
        self.source = source
        self.tokens = {"bos_token": bos_token or "", "eos_token": eos_token or "", **tokens}
        """By name, as bos_token."""
        try:
            self._template = _compile(source)
        except jinja2.exceptions.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from error

    @classmethod
    def from_folder(
        cls, folder: pathlib.Path, settings: Mapping[str, Any]
    ) -> "ChatTemplate | None":
        """From chat_template.jinja, chat_template.json or `settings` (tokenizer_config.json), in
        this order.
        """
        source: Any = settings.get("chat_template")
        if (path := folder / "chat_template.jinja").exists():
            source = path.read_text(encoding="utf-8")
        elif (path := folder / "chat_template.json").exists():
            source = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(
            source, list
        ):  # several, named: [{"name": "default", "template": "..."}, ...]
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise CheckpointError(
                    f"chat template: none is named default, only {', '.join(named)}"
                )
            source = named["default"]
        if not source:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"chat template: is a {type(source).__name__}; allowed: a string")
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[name] = token
        return cls(source, **tokens)

    def check_tools(self) -> None:
        """Raises: UnsupportedParameter unless the template tells of tools."""
        self._need("tools", "tools")

    def check_message(self, message: Mapping[str, Any], calls: str, role: str) -> None:
        """Raises: UnsupportedParameter for a message with calls (the field `calls`), or of a tool
        (the field `role`), which the template has no place for.
        """
        if message.get("tool_calls"):
            self._need("tool_calls", calls)
        if message["role"] == "tool":
            self._need("tool", role)

    def _need(self, name: str, field: str) -> None:
        if name not in self.source:
            raise UnsupportedParameter(
                field, f"not supported by this model, whose chat template has no {name!r} in it"
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}), up to where the assistant's
        answer begins.

        Content that is a list of {"type": "text", "text": ...} parts is joined into one string.
        Raises: InvalidRequest for malformed messages, or with what the template itself objects to;
        UnsupportedParameter for tools, calls and their answers where it has no place for them.
        """
        plain = check_messages(messages)
        if tools:
            self.check_tools()
        for index, message in enumerate(plain):
            where = f"messages[{index}]"
            self.check_message(message, f"{where}.tool_calls", f"{where}.role")
        try:
            text = self._template.render(
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self.tokens | variables),
            )
        except jinja2.exceptions.SecurityError as error:
            raise InvalidRequest(
                "messages", f"the model's chat template is not safe: {error}"
            ) from error
        except jinja2.exceptions.TemplateError as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                "messages", f"the model's chat template fails on them: {error!r}"
            ) from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise InvalidRequest("messages", f"make a prompt of {len(text)} characters")
        return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts with string content (or None, where an assistant's message has other
    fields).

    Raises: InvalidRequest naming the message that is not as it should be.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(
            "messages", "allowed: a list of one or more {'role': ..., 'content': ...}"
        )
    checked = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                field, f"is a {type(message).__name__}; allowed: {{'role': ..., 'content': ...}}"
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequest(
                f"{field}.role", f"is {message.get('role')!r}; allowed: a string such as 'user'"
            )
        checked.append({**message, "content": _content(f"{field}.content", message)})
    return checked


def _content(field: str, message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and len(message) > 1:
        return None
    if isinstance(content, Sequence) and not isinstance(content, bytes) and content:
        texts = []
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequest(field, f"has a part of type {kind!r}; allowed: 'text'")
            texts.append(part["text"])
        return "".join(texts)
    raise InvalidRequest(
        field, f"is a {type(content).__name__}; allowed: a string or a list of text parts"
    )
