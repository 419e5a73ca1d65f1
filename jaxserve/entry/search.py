"""Requests whose choices are found by requests of their own: `best_of`, and beam search.

Beam search is the one of Hugging Face's `generate`: hypotheses that end are ranked by the sum of
their log-probabilities over length ** length_penalty, and only those among the best `beams`
continuations of a step count. Scores are of the distribution after repetition_penalty and
no_repeat_ngram_size. Each step asks the engine for one token of each beam with its
likeliest alternatives; the prefix cache has all whole pages of it. Imports no jax.
"""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable

import msgspec

from jaxserve.types import (
    Choice,
    ChosenLogprob,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
    TokenSampling,
)

Ask = Callable[[list[int], SamplingParams, TokenSampling], Awaitable[RequestOutput]]
"""Runs a request and returns all of it."""


def is_search(params: SamplingParams) -> bool:
    return params.use_beam_search or (params.best_of or 0) > params.n


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to."""

    choices: list[TokenOutput]
    """`n` of them, best first, each as if the engine had sent it at once."""
    num_unseen_tokens: int = 0
    """Generated for candidates that are not among them."""
    prompt_logprobs: list[ChosenLogprob | None] | None = None


async def run(
    prompt: list[int], params: SamplingParams, sampling: TokenSampling, ask: Ask
) -> Found:
    search = search_beams if params.use_beam_search else best_of
    return await search(prompt, params, sampling, ask)


async def best_of(
    prompt: list[int], params: SamplingParams, sampling: TokenSampling, ask: Ask
) -> Found:
    """The choices of highest mean log-probability per token."""
    inner = msgspec.structs.replace(
        params,
        n=params.best_of or params.n,
        best_of=None,
        logprobs=params.logprobs or 0,
        echo=False,
        stream_interval=1,
    )
    wanted = msgspec.structs.replace(sampling, logprobs=inner.logprobs)
    output = await ask(prompt, inner, wanted)
    ranked = sorted(output.choices, key=mean_logprob, reverse=True)
    unseen = sum(len(choice.token_ids) for choice in ranked[params.n :])
    cached = output.usage.cached_tokens
    best = [_output(choice, params, cached) for choice in ranked[: params.n]]
    return Found(best, unseen, output.prompt_logprobs)


def mean_logprob(choice: Choice) -> float:
    logprobs = [token.logprob for token in choice.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _output(choice: Choice, params: SamplingParams, num_cached_tokens: int) -> TokenOutput:
    logprobs = None
    if params.logprobs is not None or params.token_ids_logprob:
        logprobs = [
            TokenLogprobs(
                token.logprob,
                [token_id for _, token_id, _ in token.top],
                [logprob for _, _, logprob in token.top],
                [logprob for _, _, logprob in token.named],
            )
            for token in choice.logprobs or ()
        ]
    return TokenOutput(
        request_id="",
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        num_cached_tokens=num_cached_tokens,
        logprobs=logprobs,
    )


@dataclasses.dataclass(frozen=True)
class Beam:
    """A hypothesis."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """Of all its tokens together."""
    logprobs: tuple[TokenLogprobs, ...] = ()


async def search_beams(
    prompt: list[int], params: SamplingParams, sampling: TokenSampling, ask: Ask
) -> Found:
    """The `n` best hypotheses of a search with `best_of` beams.

    Raises: InvalidRequest if the options leave fewer; what `ask` raises.
    """
    num_beams = params.best_of or params.n
    ends = frozenset(sampling.stop_token_ids)
    # at least `num_beams` of these go on
    num_tops = max(num_beams + len(ends), params.logprobs or 0)
    num_cached = None
    one_token = TokenSampling(
        max_tokens=1,
        temperature=0.0,
        logprobs=num_tops,
        logprobs_mode="processed_logprobs",
        num_tokens=sampling.num_tokens,
        # These look at prompt and output alike; a beam's tokens are prompt here.
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
    )

    async def continuations(beam: Beam) -> list[tuple[int, float]]:
        nonlocal num_cached
        output = await ask(
            [*prompt, *beam.token_ids],
            SamplingParams(max_tokens=1, temperature=0, logprobs=num_tops, ignore_eos=True),
            one_token,
        )
        if num_cached is None:
            num_cached = output.usage.cached_tokens
        token = (output.choices[0].logprobs or [])[0]
        return [(token_id, logprob) for _, token_id, logprob in token.top if logprob > -math.inf]

    running, finished = [Beam()], list[tuple[float, Beam]]()
    for length in range(1, sampling.max_tokens + 1):
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(continuations(beam)) for beam in running]
        may_end = length > sampling.min_tokens
        candidates = [
            _extend(beam, token_id, logprob, task.result(), params)
            for beam, task in zip(running, asked, strict=True)
            for token_id, logprob in task.result()
            if may_end or token_id not in ends
        ]
        candidates.sort(key=lambda beam: beam.logprob, reverse=True)
        is_last = length == sampling.max_tokens
        running = [beam for beam in candidates if not is_last and beam.token_ids[-1] not in ends]
        running = running[:num_beams]
        for beam in candidates[:num_beams]:
            if is_last or beam.token_ids[-1] in ends:
                finished.append((beam.logprob / length**params.length_penalty, beam))
        finished.sort(key=lambda scored: scored[0], reverse=True)
        del finished[num_beams:]
        if not running:
            break
        if len(finished) == num_beams:
            reach = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                reach = sampling.max_tokens
            best = running[0].logprob / reach**params.length_penalty
            if params.early_stopping is True or best <= finished[-1][0]:
                break
    if len(finished) < params.n:
        raise InvalidRequest("n", f"is {params.n}; the options leave {len(finished)} texts")
    return Found(
        [
            TokenOutput(
                request_id="",
                token_ids=list(beam.token_ids),
                finish_reason="stop" if beam.token_ids[-1] in ends else "length",
                num_cached_tokens=num_cached or 0,
                logprobs=None if params.logprobs is None else list(beam.logprobs),
            )
            for _, beam in finished[: params.n]
        ]
    )


def _extend(
    beam: Beam,
    token_id: int,
    logprob: float,
    tops: list[tuple[int, float]],
    params: SamplingParams,
) -> Beam:
    logprobs = beam.logprobs
    if params.logprobs is not None:
        top = tops[: params.logprobs]
        entry = TokenLogprobs(logprob, [token for token, _ in top], [value for _, value in top])
        logprobs = (*logprobs, entry)
    return Beam((*beam.token_ids, token_id), beam.logprob + logprob, logprobs)
