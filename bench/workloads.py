"""Loads made from `bench.trace`'s generator: the same for the same seed, on any version.

Token ids are uniform over [10, vocab), as the trace's are.
"""

import dataclasses
import math
from collections.abc import Iterable

from bench.trace import SplitMix64, make_trace

Request = tuple[list[int], int]
"""A prompt, and how many tokens to generate."""


def trace_requests(count: int, shrink: int, vocab: int, seed: int = 0) -> list[Request]:
    """The trace, its lengths divided by `shrink`."""
    return [
        (prompt[: max(1, len(prompt) // shrink)], max(1, length // shrink))
        for prompt, length in make_trace(count, seed, vocab)
    ]


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """When each of `count` requests arrives, in seconds: `rate` a second on average, gaps
    exponential."""
    random = SplitMix64(15485863 * (seed + 1))
    arrivals, now_s = [], 0.0
    for _ in range(count):
        now_s -= math.log(random.unit()) / rate
        arrivals.append(now_s)
    return arrivals


def few_shot(
    tasks: int, questions: int, shots_len: int, question_len: int, vocab: int, seed: int = 0
) -> list[list[int]]:
    """Prompts of `questions` questions to each of `tasks` tasks; a task's examples come first.

    Tasks take turns, as a server would see them. Questions are half to one and a half times
    `question_len` long.
    """
    random = SplitMix64(32452843 * (seed + 1))
    shots = [random.tokens(shots_len, vocab) for _ in range(tasks)]
    return [
        shots[task] + random.tokens(_around(random, question_len), vocab)
        for _ in range(questions)
        for task in range(tasks)
    ]


@dataclasses.dataclass
class Conversation:
    """What its user says; `history` grows by each message and each answer."""

    history: list[int]
    messages: list[list[int]]

    def say(self, turn: int) -> list[int]:
        """The prompt of this turn: all that was said so far, and the user's next message."""
        self.history += self.messages[turn]
        return list(self.history)

    def hear(self, answer: Iterable[int]) -> None:
        self.history += answer


def multi_turn(
    conversations: int, turns: int, system_len: int, message_len: int, vocab: int, seed: int = 0
) -> list[Conversation]:
    """Conversations that begin with one system prompt; messages are half to one and a half times
    `message_len` long."""
    random = SplitMix64(49979687 * (seed + 1))
    system = random.tokens(system_len, vocab)
    return [
        Conversation(
            list(system),
            [random.tokens(_around(random, message_len), vocab) for _ in range(turns)],
        )
        for _ in range(conversations)
    ]


def shareable_tokens(prompts: Iterable[list[int]], page_size: int) -> int:
    """Prompt tokens in whole pages that an earlier prompt begins with too: what an endless cache
    of prompts would have. A prompt's last token is always computed."""
    seen: set[int] = set()
    shared = 0
    for prompt in prompts:
        key = 0
        for begin in range(0, len(prompt) - page_size + 1, page_size):
            key = hash((key, *prompt[begin : begin + page_size]))
            if key in seen and begin + page_size < len(prompt):
                shared += page_size
            seen.add(key)
    return shared


def _around(random: SplitMix64, mean: int) -> int:
    return max(1, mean // 2 + random.u64() % (mean + 1))
