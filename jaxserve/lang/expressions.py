"""What a program appends to its state: gen, select, roles, and text between them.

They only describe; `interpreter` runs them.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.types import Grammar, InvalidRequest, SamplingParams


class ProgramError(ValueError):
    """A program that can't be run as it is written, or text that is not what it asked for."""


class Expression:
    """Joins with text and other expressions by `+`."""

    def __add__(self, other: "Text") -> "Joined":
        return Joined((*_parts(self), *_parts(other)))

    def __radd__(self, other: "Text") -> "Joined":
        return Joined((*_parts(other), *_parts(self)))

    def __format__(self, spec: str) -> str:
        """Raises: ProgramError: text would have a description, and the model be asked nothing."""
        raise ProgramError(f'{self!s} stands in an f-string; join by +: "..." + {self!s}')


Text = str | Expression


@dataclasses.dataclass(frozen=True)
class Joined(Expression):
    """Expressions one after the other."""

    parts: tuple[Text, ...]

    def __str__(self) -> str:
        return " + ".join(repr(one) if isinstance(one, str) else str(one) for one in self.parts)


@dataclasses.dataclass(frozen=True)
class Role(Expression):
    """A whole message."""

    role: str
    content: Text

    def __str__(self) -> str:
        return f"{self.role}(...)"


@dataclasses.dataclass(frozen=True)
class Select(Expression):
    """The likeliest of some texts."""

    name: str | None
    choices: tuple[str, ...]

    def __str__(self) -> str:
        return f"select({self.name!r})"


@dataclasses.dataclass(frozen=True)
class Gen(Expression):
    """Text that the model writes."""

    name: str | None
    sampling: Mapping[str, Any]
    """Fields of SamplingParams that were given."""
    dtype: type = str

    def __str__(self) -> str:
        return f"gen({self.name!r})"

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises: InvalidRequest."""
        fields = {**defaults, **self.sampling}
        if self.dtype is not str:
            kind = VALUES[self.dtype]
            fields["grammar"] = Grammar.regex(kind.grammar, "dtype")
            stops = fields.get("stop_regex", ())
            stops = (stops,) if isinstance(stops, str) else tuple(stops)
            fields["stop_regex"] = (*stops, kind.stop) if kind.stop else stops
        return SamplingParams(**fields)

    def read(self, text: str) -> tuple[Any, str]:
        """(value, the part of the text that it is). Raises: ProgramError."""
        if self.dtype is str:
            return text, text
        match = re.match(VALUES[self.dtype].value, text)
        if match is None:
            raise ProgramError(f"{self!s} brought {text!r}, which is no {self.dtype.__name__}")
        word = match[0].strip()
        value = word.lower() == "true" if self.dtype is bool else self.dtype(word)
        return value, match[0]


@dataclasses.dataclass(frozen=True)
class Value:
    """How a value of a type is written. After a number the text is free, and ends there: so that
    the model ends it where it would, and not where it has no digits left."""

    grammar: str
    value: str
    stop: str | None = None


VALUES = {
    int: Value(
        r" ?-?[0-9]{1,18}([^0-9](.|\n)*)?",
        r" ?-?[0-9]+",
        r"(?<=[0-9])[^0-9]",
    ),
    float: Value(
        r" ?-?[0-9]{1,18}(\.[0-9]{1,18})?(\.?([^0-9.](.|\n)*)?)?",
        r" ?-?[0-9]+(\.[0-9]+)?",
        r"(?<=[0-9])([^0-9.]|\.[^0-9])",
    ),
    bool: Value(r" ?([Tt]rue|[Ff]alse)", r" ?([Tt]rue|[Ff]alse)"),
}

REFUSED = {
    **dict.fromkeys(("n", "best_of"), "fork the state for more texts than one"),
    **dict.fromkeys(
        ("use_beam_search", "length_penalty", "early_stopping"), "fork the state, and select"
    ),
    **dict.fromkeys(
        ("prompt_logprobs", "prompt_logprobs_start"), "select scores texts; gen takes logprobs"
    ),
    "echo": "the state's text() has the prompt",
    "truncate_prompt_tokens": "a state keeps all of its text",
    "stream_interval": "run(stream=True) tells each piece as it comes",
}
"""Fields of SamplingParams that a program can't ask for, and what it does instead."""


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    regex: str | None = None,
    choices: Iterable[str] | None = None,
    json_schema: Mapping[str, Any] | str | None = None,
    dtype: type = str,
    **sampling: Any,
) -> Gen | Select:
    """Text that the model writes here; `state[name]` has it.

    `sampling`: other fields of SamplingParams, as temperature, top_p, stop, seed, logprobs. At most
    128 tokens unless `max_tokens` says more. At the most one of `regex`, which the whole text
    matches; `json_schema`; `dtype`, int, float or bool, which makes `state[name]` a value of it;
    `grammar` among `sampling`; and `choices`, which makes it `select`.
    Raises: InvalidRequest naming what is wrong.
    """
    check_sampling(sampling)
    given: dict[str, Any] = {
        "regex": regex, "choices": choices, "json_schema": json_schema,
        "grammar": sampling.get("grammar"), "dtype": None if dtype is str else dtype,
    }  # fmt: skip
    asked = [field for field, value in given.items() if value is not None]
    if len(asked) > 1:
        raise InvalidRequest(asked[1], f"can't be given beside {asked[0]}")
    if dtype is not str and dtype not in VALUES:
        raise InvalidRequest("dtype", f"is {dtype!r}; allowed: str, int, float, bool")
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if choices is not None:
        if sampling:
            raise InvalidRequest(next(iter(sampling)), "can't be given beside choices")
        return select(name, choices)
    if regex is not None:
        sampling["grammar"] = Grammar.regex(regex, "regex")
    if json_schema is not None:
        sampling["grammar"] = Grammar.json_schema(json_schema, "json_schema")
    expression = Gen(_checked_name(name), sampling, dtype)
    expression.params({})
    return expression


def select(name: str | None = None, choices: Iterable[str] = ()) -> Select:
    """The one of `choices` with the highest log-likelihood per token; `state[name]` has it, and
    `state.get_meta(name)` each choice's score.

    Raises: InvalidRequest.
    """
    is_list = isinstance(choices, Iterable) and not isinstance(choices, str)
    texts = tuple(choices) if is_list else ()
    if not is_list or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest("choices", "allowed: a list of non-empty strings")
    if not texts or len(set(texts)) < len(texts):
        raise InvalidRequest("choices", "allowed: one string or more, each once")
    return Select(_checked_name(name), texts)


def system(content: Text) -> Role:
    """A system message."""
    return Role("system", content)


def user(content: Text) -> Role:
    """A user's message."""
    return Role("user", content)


def assistant(content: Text) -> Role:
    """An answer; `gen` and `select` go in here."""
    return Role("assistant", content)


def check_sampling(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidRequest for a field that SamplingParams hasn't, or a program can't have."""
    for field in fields:
        if field in REFUSED:
            raise InvalidRequest(field, f"can't be given in a program: {REFUSED[field]}")
        if field not in SamplingParams.__struct_fields__:
            raise InvalidRequest(field, "is no sampling parameter")


def _checked_name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("name", f"is a {type(name).__name__}; allowed: a string")
    return name


def _parts(value: Any) -> tuple[Text, ...]:
    if isinstance(value, Joined):
        return value.parts
    if isinstance(value, str | Expression):
        return (value,)
    raise TypeError(f"a {type(value).__name__} can't be joined with an expression")
