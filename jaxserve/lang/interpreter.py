"""Runs one gen or select: the prompt's tokens, the request, and what becomes of its answer.

A prompt begins with the tokens that were computed and generated before, as they were, and only what
the program has added is tokenized: so the prefix cache has all whole pages of them. (One language
for programs and their cached prefixes: SGLang, arXiv:2312.07104.)
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.lang.backend import Backend
from jaxserve.lang.expressions import Gen, ProgramError, Select
from jaxserve.lang.transcript import Known, Result, Transcript, Variable
from jaxserve.types import MAX_NAMED_TOKENS


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Text to go on from: tokens that are known, and text after them."""

    known: Known
    rest: str
    adds_special_tokens: bool
    """Whether those that the model expects at the start are still to be added."""

    @property
    def text(self) -> str:
        return self.known.text + self.rest

    async def token_ids(self, backend: Backend, ending: str = "") -> list[int]:
        """Of the prompt with the ending."""
        text = self.rest + ending
        if not text:
            return self.known.token_ids
        return self.known.token_ids + await backend.encode(text, self.adds_special_tokens)


async def make_prompt(backend: Backend, transcript: Transcript) -> Prompt:
    """Of a transcript whose variables are finished.

    Where the chat template writes what was said otherwise than it was, all of it is tokenized anew.
    """
    if transcript.is_chat:  # in a thread: a template may loop for long
        text = await asyncio.to_thread(transcript.text, backend.chat_template)
    else:
        text = transcript.text(None)
    last = transcript.last_variable
    known = last.result().known if last is not None else None
    if known is None or not text.startswith(known.text):
        return Prompt(Known("", []), text, not transcript.is_chat)
    return Prompt(known, text[len(known.text) :], False)


async def evaluate(
    backend: Backend,
    transcript: Transcript,
    variable: Variable,
    defaults: Mapping[str, Any],
    on_text: Callable[[str], None] | None,
) -> Result:
    """Runs `variable`, which stands at the transcript's end.

    `defaults`: sampling parameters for what the gen leaves open. `on_text` hears a text's pieces.
    Raises: ProgramError, InvalidRequest, RequestFailed, EngineDead.
    """
    prompt = await make_prompt(backend, transcript)
    if isinstance(variable.expression, Select):
        return await select_choice(backend, prompt, variable.expression)
    return await generate(backend, prompt, variable.expression, defaults, on_text)


async def generate(
    backend: Backend,
    prompt: Prompt,
    gen: Gen,
    defaults: Mapping[str, Any],
    on_text: Callable[[str], None] | None,
) -> Result:
    token_ids = await prompt.token_ids(backend)
    if gen.dtype is not str:
        on_text = None  # the text may be shortened to the value
    found = await backend.generate(token_ids, gen.params(defaults), on_text)
    value, text = gen.read(found.text)
    known = Known(prompt.text, token_ids)
    if found.text_ids is not None and text == found.text:
        known = Known(known.text + text, token_ids + found.text_ids)
    meta: dict[str, Any] = {
        "text": text,
        "finish_reason": found.finish_reason,
        "stop_reason": found.stop_reason,
        "prompt_tokens": found.usage.prompt_tokens,
        "completion_tokens": found.usage.completion_tokens,
        "cached_tokens": found.usage.cached_tokens,
    }
    if found.logprobs is not None:
        meta["logprobs"] = found.logprobs
    return Result(value, text, meta, known if backend.joins_tokens else None)


async def select_choice(backend: Backend, prompt: Prompt, select: Select) -> Result:
    """Scores all choices at once and takes the one with the highest log-likelihood per token.

    A choice is scored as it is tokenized with the text before it, from the first token on that is
    not the same for the text alone and for each choice: that may be the text's last, as a space is
    that joins the next word. The last token of a choice is scored as the one after the others, so
    that choices which differ in it alone are one prompt, and single tokens are no prompt at all.
    """
    alone, *endings = await asyncio.gather(
        prompt.token_ids(backend), *(prompt.token_ids(backend, one) for one in select.choices)
    )
    columns = zip(alone, *endings, strict=False)
    start = len(list(itertools.takewhile(lambda tokens: len(set(tokens)) == 1, columns)))
    counts = [len(ending) - start for ending in endings]
    if start == 0 or min(counts) == 0:
        raise ProgramError(f"{select!s} needs text before it that its choices leave as it is")
    sums = [0.0] * len(endings)
    prompt_tokens = cached_tokens = 0
    for indices in _groups(endings):
        prompts = sorted({tuple(endings[i][:-1]) for i in indices})
        named = sorted({endings[i][-1] for i in indices})
        scored = await backend.score([list(one) for one in prompts], start - 1, named)
        for i in indices:
            one = scored[prompts.index(tuple(endings[i][:-1]))]
            sums[i] = sum(one.logprobs) + one.named[named.index(endings[i][-1])]
        prompt_tokens += sum(one.usage.prompt_tokens for one in scored)
        cached_tokens += sum(one.usage.cached_tokens for one in scored)
    scores = [total / count for total, count in zip(sums, counts, strict=True)]
    best = max(range(len(scores)), key=scores.__getitem__)
    text = select.choices[best]
    meta = {
        "text": text,
        "choices": list(select.choices),
        "scores": scores,
        "logprobs": sums,
        "num_tokens": counts,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
    }
    known = Known(prompt.text + text, endings[best]) if backend.joins_tokens else None
    return Result(text, text, meta, known)


def _groups(endings: Sequence[list[int]]) -> list[list[int]]:
    """The choices' indices, in groups that end in as many different tokens as may be named."""
    groups: list[list[int]] = [[]]
    named: set[int] = set()
    for index, ending in enumerate(endings):
        if len(named | {ending[-1]}) > MAX_NAMED_TOKENS:
            groups.append([])
            named = set()
        named.add(ending[-1])
        groups[-1].append(index)
    return groups
