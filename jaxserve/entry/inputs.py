"""What callers may pass, made definite: prompts, conversations and parameters in their forms.

Everything that a user may leave open is decided in `resolve_sampling`, so that the engine sees
token ids and numbers only. Imports no jax.
"""

import functools
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from jaxserve.entry.text_model import TextModel
from jaxserve.types import (
    ALL_LOGPROBS,
    MAX_LOGPROBS,
    ContextExceeded,
    EngineInfo,
    Grammar,
    InvalidRequest,
    SamplingParams,
    TokenSampling,
)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def resolve_sampling(
    params: SamplingParams,
    num_prompt_tokens: int,
    model: TextModel,
    info: EngineInfo,
    default_max_tokens: int | None = None,
) -> TokenSampling:
    """`params` with everything decided: the user's value, else the model's, else OpenAI's.

    Without max_tokens it's the model's, else `default_max_tokens`, at least min_tokens; or, where
    that is None or more, the room that the context has.
    For the first choice; the seed is 0 where the user gave none (see `for_choice`).
    Raises: ContextExceeded, InvalidRequest.
    """
    room = info.max_request_tokens - num_prompt_tokens
    limit = f"the context is {info.max_model_len} tokens"
    if info.max_request_tokens < info.max_model_len:
        limit += f", of which the KV pages hold {info.max_request_tokens}"
    if room < 1:
        raise ContextExceeded(
            "prompt", f"has {num_prompt_tokens} tokens; {limit}, with at least one to generate"
        )
    for field in ("max_tokens", "min_tokens"):
        value = getattr(params, field)
        if value is not None and value > room:
            beside = f"allowed beside the prompt's {num_prompt_tokens} tokens: up to {room}"
            raise ContextExceeded(field, f"is {value}; {beside}; {limit}")
    if params.prompt_logprobs_start >= num_prompt_tokens:
        raise InvalidRequest(
            "prompt_logprobs_start",
            f"is {params.prompt_logprobs_start}; allowed: below the prompt's {num_prompt_tokens}",
        )
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "token_ids_logprob"):
        for token_id in getattr(params, field) or ():
            check_token_id(field, token_id, info.vocab_size)
    if model.tokenizer is None:
        for field in ("stop", "stop_regex", "echo"):
            if getattr(params, field):
                raise InvalidRequest(
                    field, f"needs text, and {model.name} has no tokenizer; use stop_token_ids"
                )

    if params.grammar is not None and model.tokenizer is None:
        raise InvalidRequest(params.grammar.field, f"needs text, and {model.name} has no tokenizer")

    def first(field: str, otherwise: float) -> float:
        for source in (params, model.defaults):
            if (value := getattr(source, field)) is not None:
                return value
        return otherwise

    max_tokens = params.max_tokens
    if max_tokens is None:
        default = model.defaults.max_tokens or default_max_tokens or room
        max_tokens = min(room, max(default, params.min_tokens))
    top_k = int(first("top_k", 0))
    stop_token_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_token_ids |= {id for id in model.eos_token_ids if id < info.vocab_size}
    num_tokens = info.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    return TokenSampling(
        max_tokens=max(1, max_tokens),  # one is sampled, and dropped, where none is wanted
        min_tokens=params.min_tokens,
        temperature=float(first("temperature", 1.0)),
        top_k=top_k if 0 < top_k < info.vocab_size else 0,
        top_p=float(first("top_p", 1.0)),
        min_p=float(first("min_p", 0.0)),
        typical_p=float(first("typical_p", 1.0)),
        repetition_penalty=float(first("repetition_penalty", 1.0)),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        no_repeat_ngram_size=int(first("no_repeat_ngram_size", 0)),
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=bad_word_ids(params.bad_words, model, info.vocab_size),
        seed=params.seed or 0,
        stop_token_ids=tuple(sorted(stop_token_ids)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprobs_start=params.prompt_logprobs_start,
        token_ids_logprob=params.token_ids_logprob,
        logprobs_mode=params.logprobs_mode,
        num_tokens=min(num_tokens, info.vocab_size),
        grammar=params.grammar,
    )


def bad_word_ids(
    words: Sequence[str | Sequence[int]], model: TextModel, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each as token ids; a string as it starts a text and as it follows a space, as in vLLM.

    Raises: InvalidRequest.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(check_token_ids("bad_words", word, vocab_size))] = None
            continue
        if model.tokenizer is None:
            raise InvalidRequest(
                "bad_words", f"has a string, and {model.name} has no tokenizer; use token ids"
            )
        for text in (word.lstrip() or word, " " + word.lstrip()):
            token_ids = model.tokenizer.encode(text, False, field="bad_words")
            found[tuple(check_token_ids("bad_words", token_ids, vocab_size))] = None
    return tuple(found)


def truncate_prompt(
    token_ids: list[int], params: SamplingParams, max_request_tokens: int
) -> list[int]:
    """The prompt's last tokens, as many as `truncate_prompt_tokens` says."""
    most = params.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, max_request_tokens - (params.max_tokens or params.min_tokens or 1))
    return token_ids[-most:]


def check_search(params: SamplingParams, num_ends: int) -> None:
    """Raises: InvalidRequest for what can't be had with beam search."""
    if not params.use_beam_search:
        return
    neutral: dict[str, tuple[Any, ...]] = {
        "temperature": (None, 0), "top_k": (None, 0, -1), "top_p": (None, 1), "min_p": (None, 0),
        "stop": ((),), "stop_regex": ((),), "typical_p": (None, 1), "grammar": (None,),
        "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
        "allowed_token_ids": (None,), "bad_words": ((),), "prompt_logprobs": (None,),
        "token_ids_logprob": ((),), "logprobs_mode": ("raw_logprobs",),
    }  # fmt: skip
    for field, values in neutral.items():
        value = getattr(params, field)
        if value not in values:
            name = value.field if isinstance(value, Grammar) else field
            raise InvalidRequest(name, "can't be given with use_beam_search")
    if params.logprobs == ALL_LOGPROBS:
        raise InvalidRequest("logprobs", "of the whole vocabulary aren't had with use_beam_search")
    beams = params.best_of or params.n
    if beams + num_ends > MAX_LOGPROBS:
        field = "n" if params.best_of is None else "best_of"
        raise InvalidRequest(
            field, f"is {beams} beams; allowed: at most {MAX_LOGPROBS - num_ends} here"
        )


def check_options(request_id: Any, priority: Any, cache_salt: Any, policy: str) -> None:
    """Raises: InvalidRequest for what the engine could not take."""
    for field, value, most in (("request_id", request_id, 256), ("cache_salt", cache_salt, 1024)):
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise InvalidRequest(
                field, f"is {value!r}; allowed: a string of at most {most} printable characters"
            )
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise InvalidRequest("priority", f"is {priority!r}; allowed: a 32-bit integer")
    if priority and policy != "priority":
        raise InvalidRequest(
            "priority", f"is {priority}; allowed: 0, since the engine runs with --policy {policy}"
        )


def choice_seed(seed: int | None, index: int) -> int:
    """The seed of a choice: the request's own for the first, derived for others; fresh for None."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def for_choice(sampling: TokenSampling, seed: int, index: int) -> TokenSampling:
    """The parameters of one choice: its own seed; only the first scores the prompt."""
    scored = sampling.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=scored)


def check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidRequest(field, f"has {token_id}; allowed: 0 to {vocab_size - 1}")


def check_token_ids(field: str, given: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as a list, one at least. Raises: InvalidRequest."""
    token_ids = list(given)
    if not token_ids:
        raise InvalidRequest(field, "is empty; allowed: one token or more")
    try:
        # at once: a prompt's first token waits for this
        return msgspec.convert(token_ids, _token_ids_type(vocab_size))
    except msgspec.ValidationError:
        pass
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidRequest(field, f"has {token_id!r}; allowed: token ids")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"has token id {token_id}; allowed: 0 to {vocab_size - 1}")
    return [int(token_id) for token_id in token_ids]  # of a class that is derived from int


@functools.cache
def _token_ids_type(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or several, as a list. Raises: InvalidRequest."""
    allowed = "allowed: strings, or lists of token ids"
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"is a {type(prompts).__name__}; {allowed}")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, str | Sequence):
            raise InvalidRequest("prompts", f"has a {type(item).__name__}; {allowed}")
    return listed


def list_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises: InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    listed = list(params)
    for item in listed:
        if not isinstance(item, SamplingParams):
            raise InvalidRequest("params", f"has a {type(item).__name__}; allowed: SamplingParams")
    if len(listed) != num_prompts:
        raise InvalidRequest(
            "params", f"are {len(listed)} for {num_prompts} prompts; allowed: one, or one each"
        )
    return listed


def list_conversations(conversations: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation (a list of messages) or several, as a list. Raises: InvalidRequest."""
    if (
        not isinstance(conversations, Sequence)
        or isinstance(conversations, str)
        or not conversations
    ):
        raise InvalidRequest("messages", "allowed: a list of messages, or a list of such lists")
    listed: list[Any] = list(conversations)
    return [listed] if isinstance(listed[0], Mapping) else listed
