"""The vocabulary that every part of jaxserve shares: parameters, requests, outputs, errors. Imports
no jax.

Everything here is frozen. What a user may leave open is `None` in `SamplingParams`; `TokenSampling`
is the same after `resolve`, with every value decided, and is all that the engine ever sees.
"""

import json
import math
import typing
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, get_args

import msgspec

from jaxserve.observation import (
    Histogram,
    compile_histogram,
    host_histogram,
    token_histogram,
)

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_REGEXES = 16
MAX_LOGPROBS = 20
ALL_LOGPROBS = -1
"""In place of a number of likeliest tokens: the whole vocabulary."""
MAX_NAMED_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 8192
"""Of all bad words of a request together; characters, where they are strings."""
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_CHARACTERS = 1 << 18

Pooling = Literal["last", "mean"]
"""Of a prompt's hidden states after the last norm: that of its last token, or their mean."""
FinishReason = Literal["stop", "length", "abort", "error"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class InvalidRequest(ValueError):
    """A request that can't be served as written; `field` names what is wrong (HTTP 400,
    INVALID_ARGUMENT)."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ContextExceeded(InvalidRequest):
    """Prompt, or prompt and max_tokens, need more than the context or the KV memory holds."""


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here (HTTP 404, NOT_FOUND)."""


class QueueFull(RuntimeError):
    """As many requests wait as are allowed to (HTTP 429, RESOURCE_EXHAUSTED)."""

    def __init__(self, limit: int, retry_after_s: int = 1):
        super().__init__(
            f"{limit} requests are in flight already, the most there may be; "
            f"retry in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):
    """The engine ended, or is being shut down; nothing can be served (HTTP 503, UNAVAILABLE)."""


class RequestFailed(RuntimeError):
    """The engine gave one request up and goes on (HTTP 500, INTERNAL)."""


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded as it is: says which file or tensor and why."""


class UnsupportedModel(ValueError):
    """A model family, or a key of its config, that nothing here handles."""


class ConfigError(ValueError):
    """An engine or server setting that can't hold; names the field, its value and what is
    allowed."""


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True):
    """What a generated text must look like. Made by one of the class methods.

    Raises: InvalidRequest, naming `field`, for what is no grammar on the face of it. What the
    engine can't compile is refused when a request brings it, before anything is generated.
    """

    kind: GrammarKind
    text: str
    """A schema, a list of choices and structural tags are JSON."""
    field: str = "grammar"
    """What the user called it, for errors."""

    def __post_init__(self):
        if not isinstance(self.text, str):
            raise InvalidRequest(self.field, f"is a {type(self.text).__name__}; allowed: text")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                self.field,
                f"has {len(self.text)} characters; allowed: at most {MAX_GRAMMAR_CHARACTERS}",
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(self.field, f"is not valid Unicode text: {error}") from None

    @classmethod
    def parse(cls, text: str, field: str = "grammar") -> Self:
        """One written as KIND=TEXT, such as regex=[0-9]+ or choice=["yes", "no"]."""
        kind, _, rest = text.partition("=")
        if kind not in get_args(GrammarKind):
            allowed = ", ".join(get_args(GrammarKind))
            raise InvalidRequest(field, f"kind is {kind!r}; allowed: {allowed}")
        if kind == "json_object":
            return cls.json_object(field)
        return getattr(cls, kind)(parse_json(rest, field) if kind == "choice" else rest, field)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, field: str = "grammar") -> Self:
        """JSON that the schema (also as text) describes."""
        value = parse_json(schema, field)
        if not isinstance(value, dict | bool):
            raise InvalidRequest(field, "is no JSON schema; allowed: an object or a boolean")
        return cls("json_schema", to_json(value, field), field)

    @classmethod
    def json_object(cls, field: str = "grammar") -> Self:
        """Any JSON object."""
        return cls("json_object", "", field)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> Self:
        """Text that matches as a whole, in the syntax of Rust's regex crate."""
        return cls("regex", pattern, field)

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "grammar") -> Self:
        """One of these texts."""
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
            raise InvalidRequest(field, "allowed: a list of one string or more")
        return cls("choice", to_json(list(choices), field), field)

    @classmethod
    def grammar(cls, text: str, field: str = "grammar") -> Self:
        """Context-free: Lark's syntax with a rule `start`, or EBNF (GBNF) with a rule `root`."""
        return cls("grammar", text, field)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str, field: str = "grammar") -> Self:
        """Free text in which each trigger begins a structure.

        `tag`: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, also as text.
        """
        value = parse_json(tag, field)
        if not isinstance(value, dict):
            raise InvalidRequest(field, "allowed: an object with structures and triggers")
        _check_structural_tag(value, field)
        return cls("structural_tag", to_json(value, field), field)


def parse_json(value: Any, field: str) -> Any:
    """The value of a JSON text; what isn't text is returned as it is. Raises: InvalidRequest."""
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else value
    try:
        return load_json(value, field)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from None


def load_json(text: str | bytes, field: str = "") -> Any:
    """The value of a JSON text whose objects have each key once: of one that came twice, which
    counts would be anybody's guess.

    Raises: InvalidRequest naming `field`, else the key; ValueError, RecursionError for no JSON.
    """

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            key = next(key for key, _ in pairs if key in seen or seen.add(key))
            twice = f"has {key!r} twice in one object" if field else "comes twice in one object"
            raise InvalidRequest(field or key, twice)
        return found

    return json.loads(text, object_pairs_hook=read)


def to_json(value: Any, field: str) -> str:
    """The value as JSON text. Raises: InvalidRequest for what JSON has no form for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # JSON has escapes of surrogates that are no Unicode text
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"can't be written as JSON: {error}") from None


def _check_structural_tag(tag: dict[str, Any], field: str) -> None:
    def need(holds: bool, what: str) -> None:
        if not holds:
            raise InvalidRequest(field, what)

    unknown = tag.keys() - {"type", "structures", "triggers"}
    need(not unknown, f"has {', '.join(sorted(unknown))}; allowed: structures and triggers")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    need(isinstance(structures, list) and bool(structures), "structures: one or more are needed")
    assert isinstance(structures, list)
    need(
        isinstance(triggers, list)
        and bool(triggers)
        and all(isinstance(t, str) and t for t in triggers),
        "triggers: a list of one non-empty string or more is needed",
    )
    assert isinstance(triggers, list)
    for i, one in enumerate(structures):
        where = f"structures[{i}]"
        need(isinstance(one, dict), f"{where}: is no object")
        unknown = one.keys() - {"begin", "schema", "end"}
        need(not unknown, f"{where}: has {', '.join(sorted(unknown))}; allowed: begin, schema, end")
        need(
            isinstance(one.get("begin"), str) and isinstance(one.get("end", ""), str),
            f"{where}: begin and end must be strings",
        )
        need(isinstance(one.get("schema", {}), dict | bool), f"{where}: schema is no JSON schema")
        fits = [t for t in triggers if one["begin"].startswith(t)]
        need(len(fits) == 1, f"{where}: begin must start with exactly one of the triggers")
    for trigger in triggers:
        need(
            any(one["begin"].startswith(trigger) for one in structures),
            f"trigger {trigger!r} begins none of the structures",
        )


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: Any) -> bool:
    """A string, and Unicode: without surrogates, which no text that is generated has."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class Range(NamedTuple):
    """What a number may be, from `low` to `high`."""

    low: float
    high: float = math.inf
    is_whole: bool = False
    is_over_low: bool = False
    """`low` itself is not allowed."""
    words: str = ""
    """How the range is told, where numbers say less."""

    def holds(self, value: Any) -> bool:
        is_number = whole(value) if self.is_whole else real(value)
        over = is_number and (value > self.low if self.is_over_low else value >= self.low)
        return over and value <= self.high

    def __str__(self) -> str:
        if self.words:
            return self.words
        low, high = (f"{n:g}" if isinstance(n, float) else f"{n}" for n in (self.low, self.high))
        if self.is_over_low:
            return f"over {low}, up to {high}"
        return f"{low} " + ("or more" if self.high == math.inf else f"to {high}")

    def json_schema(self) -> dict[str, float]:
        low = {"exclusiveMinimum" if self.is_over_low else "minimum": self.low}
        return low if self.high == math.inf else {**low, "maximum": self.high}


MAX_INT = 2**31 - 1
_LOGPROBS = Range(
    ALL_LOGPROBS, MAX_LOGPROBS, True, words=f"0 to {MAX_LOGPROBS}, or {ALL_LOGPROBS} for all"
)
RANGES = {
    "min_tokens": Range(0, MAX_INT, True),
    "temperature": Range(0, 2),
    "top_k": Range(-1, MAX_INT, True),
    "top_p": Range(0, 1, is_over_low=True),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, is_over_low=True),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "no_repeat_ngram_size": Range(0, MAX_INT, True),
    "prompt_logprobs_start": Range(0, MAX_INT, True),
    "seed": Range(-MAX_SEED - 1, MAX_SEED, True, words="a 64-bit integer"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "n": Range(1, MAX_CHOICES, True),
    "truncate_prompt_tokens": Range(-1, MAX_INT, True, words=f"-1, or 1 to {MAX_INT}"),
    "stream_interval": Range(1, MAX_INT, True),
    "length_penalty": Range(-10, 10),
}
"""Of SamplingParams' numbers, but for those whose range depends on others."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample, as a user states it; `None` takes the model's `generation_config.json`, else
    OpenAI's default.

    Raises: InvalidRequest naming the field, from the constructor.
    """

    max_tokens: int | None = None
    """Most tokens to generate; not given: until the context is full (in /v1/completions: 16). 0 is
    for what is only asked about the prompt: allowed with `echo` or `prompt_logprobs`."""
    min_tokens: int = 0
    """No stop token, stop string or end of text before this many tokens."""
    temperature: float | None = None
    """0 is greedy. 0 to 2."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1: all."""
    top_p: float | None = None
    """Keep the likeliest tokens whose probabilities sum to this. Over 0, up to 1."""
    min_p: float | None = None
    """Drop tokens less likely than this times the likeliest. 0 to 1."""
    typical_p: float | None = None
    """Keep the tokens whose surprise is nearest the entropy, until their probabilities sum to this.
    Over 0, up to 1. (Locally typical sampling, arXiv:2202.00666.)"""
    repetition_penalty: float | None = None
    """Divides positive logits of tokens that the prompt or the output has, multiplies negative
    ones. 0.01 to 100; 1: none."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has. -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the output has it. -2 to 2."""
    no_repeat_ngram_size: int | None = None
    """No run of this many tokens comes twice, prompt included. 0: any may."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, -100 to 100 each; at most 1,024 of them."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are sampled."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """The output never has these, each a string or a run of token ids. A string is taken as it
    starts a text and as it follows a space."""
    seed: int | None = None
    """Same seed, same prompt: same tokens, whatever else runs. None: a fresh one."""
    stop: tuple[str, ...] | str = ()
    """Generation ends before the first of these strings; they are never part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens."""
    logprobs: int | None = None
    """Log-probability of each generated token, and of this many likeliest alternatives (0 to
    20; -1: the whole vocabulary)."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first, always of the model's own
    distribution."""
    prompt_logprobs_start: int = 0
    """Those of the prompt's tokens after this one only; what the prefix cache has up to it is
    used."""
    token_ids_logprob: tuple[int, ...] = ()
    """Log-probabilities of these tokens at each place that has some; at most 128."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """raw_logprobs: of the model's own distribution; processed_logprobs: of what is sampled
    from."""
    n: int = 1
    """Choices for the prompt."""
    grammar: Grammar | None = None
    """What the text must look like; on the command line KIND=TEXT, as regex=[0-9]+."""
    best_of: int | None = None
    """Choices to generate; the `n` of highest mean log-probability per token are returned. With
    `use_beam_search`: the beams."""
    stop_regex: tuple[str, ...] | str = ()
    """Generation ends before the first match of these regular expressions, as before a stop
    string."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or what matched, at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Spaces that the tokenizer puts between special tokens; those served here put none."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as leave room for max_tokens."""
    echo: bool = False
    """Begin the text with the prompt."""
    stream_interval: int = 1
    """Stream tokens in groups of this many."""
    use_beam_search: bool = False
    """Search for the likeliest texts with `best_of` (default: n) beams; nothing is drawn."""
    length_penalty: float = 1.0
    """Beams are ranked by the sum of their log-probabilities / tokens ** this."""
    early_stopping: bool | Literal["never"] = False
    """Beam search ends: true, with as many finished beams as there are beams; false, when those
    running look unlikely to become better; never, when they can't."""

    def __post_init__(self):
        def need(field: str, holds: bool, allowed: str):
            if not holds:
                raise InvalidRequest(field, f"is {getattr(self, field)!r}; allowed: {allowed}")

        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for field in (
            "stop",
            "stop_token_ids",
            "allowed_token_ids",
            "bad_words",
            "token_ids_logprob",
        ):
            if isinstance(getattr(self, field), list):
                msgspec.structs.force_setattr(self, field, tuple(getattr(self, field)))
        asks_of_prompt = self.echo is True or self.prompt_logprobs is not None
        least = 0 if asks_of_prompt and self.grammar is None else 1
        need(
            "max_tokens",
            self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= least),
            "1 or more; 0 with echo or prompt_logprobs, and without a grammar",
        )
        for field, allowed in RANGES.items():
            value = getattr(self, field)
            is_open = value is None and field in OPEN_FIELDS
            need(field, is_open or allowed.holds(value), str(allowed))
        truncation = RANGES["truncate_prompt_tokens"]
        need("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, str(truncation))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})"
            )
        self._check_token_options(need)
        need(
            "stop",
            isinstance(self.stop, tuple) and all(is_text(s) and s for s in self.stop),
            "non-empty strings",
        )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                "stop", f"has {len(self.stop)} strings; allowed: at most {MAX_STOP_STRINGS}"
            )
        if (length := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"has {length} characters; allowed: at most {MAX_STOP_CHARACTERS}"
            )
        need("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest("prompt_logprobs_start", "is only allowed with prompt_logprobs")
        modes = typing.get_args(LogprobsMode)
        need("logprobs_mode", self.logprobs_mode in modes, " or ".join(modes))
        need("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar")
        self._check_text(need)
        self._check_search(need)

    def _check_token_options(self, need: Callable[[str, bool, str], None]) -> None:
        """The options that name tokens. Raises: InvalidRequest."""

        def need_at_most(field: str, number: int, most: int, what: str):
            if number > most:
                raise InvalidRequest(field, f"has {number} {what}; allowed: at most {most}")

        def are_ids(value: Any) -> bool:
            return isinstance(value, tuple | list) and all(whole(t) and t >= 0 for t in value)

        for field in ("stop_token_ids", "token_ids_logprob"):
            need(field, are_ids(getattr(self, field)), "token ids")
        need_at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        need_at_most("token_ids_logprob", len(self.token_ids_logprob), MAX_NAMED_TOKENS, "ids")
        need(
            "allowed_token_ids",
            self.allowed_token_ids is None
            or (are_ids(self.allowed_token_ids) and len(self.allowed_token_ids) > 0),
            "one token id or more",
        )
        need("logit_bias", isinstance(self.logit_bias, dict), "token ids with their biases")
        need_at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "ids")
        for token_id, bias in self.logit_bias.items():
            if not whole(token_id) or token_id < 0 or not real(bias) or not -100 <= bias <= 100:
                raise InvalidRequest(
                    "logit_bias",
                    f"has {token_id!r}: {bias!r}; allowed: token ids, each with -100 to 100",
                )
        need(
            "bad_words",
            isinstance(self.bad_words, tuple)
            and all(word and (isinstance(word, str) or are_ids(word)) for word in self.bad_words),
            "non-empty strings and lists of token ids",
        )
        need_at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS, "words")
        length = sum(map(len, self.bad_words))
        need_at_most("bad_words", length, MAX_BAD_WORD_TOKENS, "characters or tokens")

    def _check_text(self, need: Callable[[str, bool, str], None]) -> None:
        """Checks what concerns the text alone."""
        if isinstance(self.stop_regex, str):
            msgspec.structs.force_setattr(self, "stop_regex", (self.stop_regex,))
        elif isinstance(self.stop_regex, list):
            msgspec.structs.force_setattr(self, "stop_regex", tuple(self.stop_regex))
        need(
            "stop_regex",
            isinstance(self.stop_regex, tuple)
            and all(is_text(s) and s for s in self.stop_regex)
            and len(self.stop_regex) <= MAX_STOP_REGEXES
            and sum(map(len, self.stop_regex)) <= MAX_STOP_CHARACTERS,
            f"{MAX_STOP_REGEXES} non-empty strings of {MAX_STOP_CHARACTERS} characters in all",
        )
        for field in (
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "echo",
            "use_beam_search",
        ):
            need(field, isinstance(getattr(self, field), bool), "true or false")

    def _check_search(self, need: Callable[[str, bool, str], None]) -> None:
        """Checks how choices are found."""
        need(
            "best_of",
            self.best_of is None or (whole(self.best_of) and self.n <= self.best_of <= MAX_CHOICES),
            f"n ({self.n}) to {MAX_CHOICES}",
        )
        if self.max_tokens == 0:
            need("use_beam_search", self.use_beam_search is not True, "false with max_tokens 0")
            need("best_of", self.best_of in (None, self.n), "n with max_tokens 0")
        need(
            "early_stopping",
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            "true, false, never",
        )
        if not self.use_beam_search:
            for field, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, field) != default:
                    raise InvalidRequest(field, "is only allowed with use_beam_search")


OPEN_FIELDS = {one.name for one in msgspec.structs.fields(SamplingParams) if one.default is None}
"""Those that may be left open."""


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True):
    """`SamplingParams` with everything decided, for one choice: what the engine samples by."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ends the sequence; the model's end-of-text ids are among them unless `ignore_eos`."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    logprobs_mode: LogprobsMode = "raw_logprobs"
    num_tokens: int = 0
    """Ids from here on are padding of the model's vocabulary and never sampled; 0: none are."""
    grammar: Grammar | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute, as it travels to the engine: one prompt, one choice."""

    request_id: str
    token_ids: "array[int]"
    """Of typecode "i", which is sent, packed and looked up as the bytes that it is."""
    sampling: TokenSampling
    priority: int = 0
    """Lower runs first, under the policy `priority`."""
    arrival_s: float = 0.0
    """time.monotonic() where it arrived."""
    cache_salt: str = ""
    """Requests share computed prefixes only with requests of the same salt."""
    adapter: str = ""
    pooling: Pooling | None = None
    """The request is for an embedding: it ends with its prompt."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one token, natural log, of the distribution that `logprobs_mode`
    names."""

    logprob: float
    """Of the token that was sampled, or that the prompt has."""
    top_ids: list[int]
    """Likeliest tokens, best first; as many as the request asked for."""
    top_logprobs: list[float]
    named: list[float] = []
    """Of the request's `token_ids_logprob`."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did for one request, as it travels from the engine.

    One with no tokens and no finish_reason says that the request's grammar is compiled.
    """

    request_id: str
    token_ids: list[int]
    """New tokens, a stop token included."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache, at first admission."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's next tokens, the one after `prompt_logprobs_start` first; all come before any
    new token."""
    embedding: bytes | None = None
    """f32[D], little-endian, of a request with `pooling`."""
    error: str | None = None
    """Why, when finish_reason is `error`."""
    invalid_field: str | None = None
    """The request's field that is wrong, when the error is the user's."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of prompt_tokens, how many the prefix cache had."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RequestTimes(NamedTuple):
    """How a request went, in seconds since its arrival."""

    total_s: float
    queue_s: float | None
    """Until a step first computed something of it; None: none did, or it is a search."""
    first_token_s: float | None
    longest: int
    """Tokens of its longest choice."""


class ChosenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token, generated or of the prompt, with its log-probability and alternatives, as text and
    id."""

    token: str
    token_id: int
    logprob: float
    top: list[tuple[str, int, float]] = []
    """(text, id, logprob), best first."""
    named: list[tuple[str, int, float]] = []
    """The same of `token_ids_logprob`, in its order."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, when one that the request named did."""
    logprobs: list[ChosenLogprob] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. `text`, `token_ids`, `finish_reason` are those of its first choice."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[ChosenLogprob | None] | None = None
    """One for each token of the prompt; None for the first, which nothing predicts, and for those
    up to `prompt_logprobs_start`."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed request: text that is new since the last delta of the same choice."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[ChosenLogprob] | None = None
    prompt_logprobs: list[ChosenLogprob | None] | None = None
    """With the request's first delta, as in RequestOutput."""
    usage: Usage | None = None
    """Set on the request's last delta (of its last choice to finish): usage of the whole
    request."""

    def __str__(self) -> str:
        return self.text


class ProgramCounts(msgspec.Struct):
    """Where an engine's compiled programs came from, and the seconds that threads and processes
    spent on them, added up."""

    num_found: int = 0
    """Kept by an earlier start: neither traced nor compiled."""
    num_traced: int = 0
    num_compiled: int = 0
    """Of those traced; the others were kept under another version of the code."""
    read_s: float = 0.0
    trace_s: float = 0.0
    """Tracing and lowering."""
    compile_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves and how it is set up, told once when it is ready."""

    model: str
    model_type: str
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    max_model_len: int
    """Most tokens of a sequence, prompt and generated."""
    max_request_tokens: int
    """The same, also bounded by the KV pages there are: what a request may need at most."""
    max_num_seqs: int
    num_pages: int
    """KV pages that can be handed out."""
    page_size: int
    kv_bytes: int
    platform: str
    device_kind: str
    mesh: dict[str, int]
    dtype: str
    attention: str
    num_compiled: int
    compile_s: float
    """From the first program to the last, while weights load."""
    load_s: float
    startup_s: float
    programs: ProgramCounts = msgspec.field(default_factory=ProgramCounts)


class BucketStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one compiled step shape was used for since the engine started."""

    kind: Literal["decode", "mixed"]
    size: int
    """Tokens that a step of this shape has room for."""
    num_steps: int
    num_tokens: int
    """Tokens that these steps computed; the rest of their room was padding."""

    @property
    def num_padding(self) -> int:
        return self.size * self.num_steps - self.num_tokens


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's counters since it started, and its gauges now."""

    num_running: int = 0
    num_waiting: int = 0
    pages_used: int = 0
    """Held by sequences (pages that only the prefix cache holds count as free)."""
    pages_cached: int = 0
    """That only the prefix cache holds: used + cached + free pages are all there are."""
    pages_total: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Of admitted requests, cached ones included."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputed ones included."""
    generated_tokens: int = 0
    evicted_pages: int = 0
    """Pages that the prefix cache gave up."""
    num_corrupted: int = 0
    """Requests ended because the model's output was no number."""
    num_runtime_compiles: int = 0
    """Compilations after start-up: always 0, or it's a fault."""
    runtime_compile_s: float = 0.0
    """Seconds that they took."""
    step_seconds: dict[str, Histogram] = {}
    """How long steps took, by kind."""
    host_gap_seconds: Histogram = msgspec.field(default_factory=host_histogram)
    """What the host did between two waits for the device."""
    step_tokens: Histogram = msgspec.field(default_factory=token_histogram)
    """How many tokens steps computed."""
    buckets: tuple[BucketStats, ...] = ()
    """Of the step shapes that were used."""
    num_forced_tokens: int = 0
    """Of generated_tokens, those that a grammar left no choice and that no step was run for."""
    num_grammar_requests: int = 0
    """Requests that had a grammar."""
    num_grammars_compiling: int = 0
    """Requests that wait for their grammar now."""
    num_grammar_hits: int = 0
    """Requests whose grammar was compiled already, or was being compiled."""
    num_grammar_failures: int = 0
    """Requests refused because of their grammar, those of `num_grammar_timeouts` included."""
    num_grammar_timeouts: int = 0
    """Requests whose grammar took too long to compile."""
    grammar_compile_seconds: Histogram = msgspec.field(default_factory=compile_histogram)
    """How long grammars took to compile, failed ones included."""
