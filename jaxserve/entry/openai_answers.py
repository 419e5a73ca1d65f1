"""OpenAI's bodies and chunks that answer completions and chats. Imports no jax."""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxserve.entry.chat_format import Message
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.types import (
    Choice,
    ChosenLogprob,
    Delta,
    EngineInfo,
    RequestOutput,
    Usage,
)

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for, by its id."""
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that can't be; JSON has no infinity."""


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


class TextOffsets:
    """Where each of a choice's tokens begins in its text; told them in order."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_bytes: bytes) -> int:
        """Of a token that completes a character: where that character is."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return offset


def completion_logprobs(
    tokens: Sequence[ChosenLogprob] | None,
    bytes_of: TokenBytes,
    offsets: TextOffsets,
    *,
    has_first: bool = False,
    hidden: Collection[int] = (),
) -> dict[str, Any] | None:
    """The older form, of /v1/completions.

    `has_first`: the first token has no log-probability, as a prompt's has none. `hidden`: ids of
    tokens that are not in the text.
    """
    if tokens is None:
        return None

    def name(text: str, token_id: int) -> str:
        # OpenAI's form for bytes that are no text of their own; also keeps such tokens apart.
        token_bytes = bytes_of(token_id)
        if token_bytes == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    found: dict[str, list[Any]] = {
        "tokens": [name(t.token, t.token_id) for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [
            {name(text, i): _finite(logprob) for text, i, logprob in reversed(t.top)} or None
            for t in tokens
        ],
        "text_offset": [
            offsets.next(b"" if t.token_id in hidden else bytes_of(t.token_id)) for t in tokens
        ],
    }
    if any(t.named for t in tokens):
        found["token_ids_logprob"] = [_named_logprobs(t) for t in tokens]
    if has_first:
        for field in found.keys() - {"tokens", "text_offset"}:
            found[field][0] = None
    return found


def chat_logprobs(
    tokens: Sequence[ChosenLogprob] | None, bytes_of: TokenBytes
) -> dict[str, Any] | None:
    if tokens is None:
        return None

    def entry(text: str, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(bytes_of(token_id))}

    return {
        "content": [
            {
                **entry(t.token, t.token_id, t.logprob),
                **({"token_ids_logprob": _named_logprobs(t)} if t.named else {}),
                "top_logprobs": [entry(*other) for other in t.top],
            }
            for t in tokens
        ],
        "refusal": None,
    }


class Completion:
    """The bodies and chunks that answer one /v1/completions."""

    kind = "text_completion"

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        bytes_of: TokenBytes,
        *,
        echoed: Tokenizer | None = None,
        hidden: Collection[int] = (),
    ):
        """`echoed`: given where log-probabilities begin with the prompt's (`echo`). `hidden`: ids
        of tokens that are not in the text.
        """
        self.envelope = {"id": id, "object": self.kind, "created": created, "model": model}
        self._bytes_of = bytes_of
        self._echoed = echoed
        self._hidden = hidden
        self._offsets: dict[int, TextOffsets] = {}

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
        tokens, has_first = self._scored(
            choice.logprobs, output.prompt_logprobs, output.prompt_token_ids
        )
        return {
            "text": choice.text,
            "logprobs": self._logprobs(tokens, TextOffsets(), has_first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({} if self._echoed else _prompt_logprobs(output)),
        }

    def _scored(
        self,
        tokens: Sequence[ChosenLogprob] | None,
        prompt: Sequence[ChosenLogprob | None] | None,
        prompt_token_ids: Sequence[int],
    ) -> tuple[Sequence[ChosenLogprob] | None, bool]:
        """(the tokens that are told with log-probabilities, whether the first of them has none)."""
        if self._echoed is None or prompt is None:
            return tokens, False
        first = prompt_token_ids[0]
        text = self._echoed.token_text(first)
        scored = [ChosenLogprob(token=text, token_id=first, logprob=0.0)]
        scored += [token for token in prompt if token is not None]
        return scored + list(tokens or ()), True

    def chunks(self, index: int, delta: Delta, prompt_token_ids: Sequence[int]) -> list[Any]:
        """What is streamed for a delta of choice `index`."""
        tokens, has_first = self._scored(delta.logprobs, delta.prompt_logprobs, prompt_token_ids)
        offsets = self._offsets.setdefault(index, TextOffsets())
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(tokens, offsets, has_first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return [{**self.envelope, "choices": [choice]}]

    def _logprobs(
        self, tokens: Sequence[ChosenLogprob] | None, offsets: TextOffsets, has_first: bool
    ) -> dict[str, Any] | None:
        return completion_logprobs(
            tokens, self._bytes_of, offsets, has_first=has_first, hidden=self._hidden
        )

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
        bytes_of: TokenBytes,
        stream: bool,
        message: Callable[[], Message],
    ):
        """`message`: makes what each choice's text becomes."""
        super().__init__(id, model, created, bytes_of)
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
            "logprobs": chat_logprobs(choice.logprobs, self._bytes_of),
            "finish_reason": message.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        return [
            self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
            for index in range(num_choices)
        ]

    def chunks(self, index: int, delta: Delta, prompt_token_ids: Sequence[int]) -> list[Any]:
        message = self._messages.setdefault(index, self._message())
        events = message.push(delta.text)
        if delta.finish_reason is not None:
            events += message.finish()
        deltas = [message.delta(event) for event in events]
        if delta.logprobs and not deltas:
            deltas.append({"content": ""})
        logprobs = [chat_logprobs(delta.logprobs, self._bytes_of), *[None] * len(deltas)]
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
