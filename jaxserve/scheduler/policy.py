"""In which order waiting sequences are admitted: one function per policy. And which of those that
run keep their pages where there are too few: RANKS.

Each function gets the waiting sequences, preempted ones first and then by arrival, and one that
says how many pages of one the prefix cache has. It returns a list of its own in the order of
admission.
The first that can't be admitted ends a round, so nothing that is small overtakes what is large for
being small.
"""

import itertools
from collections.abc import Callable
from operator import attrgetter

from jaxserve.scheduler.sequence import Sequence

Policy = Callable[[list[Sequence], Callable[[Sequence], int]], list[Sequence]]

WINDOW = 32
"""How far down the line `longest_prefix` looks."""
MAX_OVERTAKEN = 32
"""After how many others the first in line goes before any other, under `longest_prefix`."""


def fcfs(waiting: list[Sequence], num_matched: Callable[[Sequence], int]) -> list[Sequence]:
    """First come, first served."""
    return list(waiting)


def longest_prefix(
    waiting: list[Sequence], num_matched: Callable[[Sequence], int]
) -> list[Sequence]:
    """Most cached pages first among the first WINDOW, so that a prefix is used before it's evicted.

    Nothing starves: the first in line is overtaken MAX_OVERTAKEN + WINDOW times at most, and the
    line moves up.
    """
    window, rest = waiting[:WINDOW], waiting[WINDOW:]
    if window and window[0].num_overtaken >= MAX_OVERTAKEN:
        return window[:1] + sorted(window[1:], key=num_matched, reverse=True) + rest
    return sorted(window, key=num_matched, reverse=True) + rest


def priority(waiting: list[Sequence], num_matched: Callable[[Sequence], int]) -> list[Sequence]:
    """Lowest `priority` first, then by arrival.

    A steady stream of urgent requests starves the others, as asked.
    """
    return sorted(waiting, key=attrgetter("request.priority"))


def longest_output(
    waiting: list[Sequence], num_matched: Callable[[Sequence], int]
) -> list[Sequence]:
    """Preempted ones, then the others; of each, most tokens left to `max_tokens` first, then by
    arrival.

    So a batch of known lengths doesn't end in a few long rows; the short ones fill the room that
    the long ones leave. A steady stream of longer requests starves the shorter. Idea: LPT rule
    (Graham 1969, SIAM J. Appl. Math. 17).
    """

    def num_left(sequence: Sequence) -> int:
        return sequence.max_total - len(sequence.token_ids)

    preempted = list(itertools.takewhile(attrgetter("num_preemptions"), waiting))
    others = waiting[len(preempted) :]
    return sorted(preempted, key=num_left, reverse=True) + sorted(
        others, key=num_left, reverse=True
    )


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "longest-prefix": longest_prefix,
    "longest-output": longest_output,
    "priority": priority,
}

RANKS: dict[str, Callable[[Sequence], int]] = {
    "fcfs": lambda _: 0,
    "longest-prefix": lambda _: 0,
    # Mostly the newest has the least to compute again and, in a batch, the least left to do.
    "longest-output": lambda _: 0,
    "priority": attrgetter("request.priority"),
}
"""Of a running sequence: the highest is preempted first, and of equals the newest."""
