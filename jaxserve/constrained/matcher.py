"""One sequence's way through its grammar: what may come next, what must, and how to end in time.

A text must be complete when its tokens run out. From some way before that on (`zone`), each sampled
token is taken only if the text can still be completed after it, in a way that is searched for and
kept; one after which no such way is found is replaced by the way that was there before it. Imports
no jax.
"""

import collections
from collections.abc import Sequence

import llguidance
import numpy as np

from jaxserve.constrained.vocabulary import Vocabulary
from jaxserve.types import FinishReason

MIN_JUMP = 2
"""Forced tokens that make a chunk of their own worth it: the step in flight has computed the token
before them, so that one of them costs a step either way."""
LEAST_ZONE = 64
SEARCH_NODES = 2000
"""Tokens that a search for an end tries at the most, while a sequence runs."""
FIRST_BOUND, NODES_PER_TOKEN = 16, 4
"""How long a way `find_end` looks for first, and how many tokens it tries per token of it."""
SCAN_AT = (1, 8, 64)
"""After how many tokens that changed nothing of what may follow `find_end` looks for one that
does."""


class LlguidanceMatcher:
    """Follows one sequence."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        start: llguidance.LLMatcher,
        shortest: list[int] | None,
        *,
        stop_token_ids: Sequence[int] = (),
        token_by_token: bool = False,
    ):
        """`start`: a compiled matcher, which is copied; `shortest`: a way from there to an end.

        `token_by_token`: every token must be sampled, since something is told or counted of each.
        """
        self._vocabulary = vocabulary
        self._ll = start.deep_copy()
        # what a text has begun mostly takes no longer to end than a whole one
        self._zone = LEAST_ZONE + 2 * len(shortest or ())
        self._token_by_token = token_by_token
        hidden = vocabulary.eos_token_ids.difference(stop_token_ids)
        self._not_hidden = ~vocabulary.bits(sorted(hidden)) if hidden else None
        self._way = shortest
        """A way to complete the text from here, where one is known."""
        self._forced: list[int] = []
        """What is still to be sampled of the way, once there is no other."""
        self._search_at = self._zone
        """The next search is due when at most so many tokens are left."""
        self.error = ""

    @property
    def native(self) -> llguidance.LLMatcher:
        return self._ll

    def advance(self, token: int, room: int) -> tuple[list[int], FinishReason | None]:
        """As scheduler.sequence.Matcher has it."""
        if self.error:
            return [], "error"
        if self._forced:
            assert token == self._forced.pop(0), "the mask allows no other"
            self._ll.consume_token(token)
            return [token], None if self._forced else "length"
        tokens = [token]
        if not self._ll.consume_token(token):
            self._fail()
            return [], "error"
        if self._ll.is_stopped():
            return tokens, "stop"
        if not self._token_by_token and room > 1:
            forced = self._ll.compute_ff_tokens()[: room - 1]
            if len(forced) >= MIN_JUMP and self._ll.consume_tokens(forced):
                tokens += forced
                if self._ll.is_stopped():
                    return tokens, "stop"
        left = room - len(tokens)
        if left > self._zone:
            self._way = None
            return tokens, None
        if self._finds_way(left) or self._way is None:
            return tokens, None
        if len(self._way) > room:
            self._way = None
            return tokens, None
        # `_way` leads on from before these tokens
        self._ll.rollback(len(tokens))
        if self._token_by_token:
            self._forced = list(self._way)
            return [], None if self._forced else "length"
        self._ll.consume_tokens(self._way)
        return self._way, "length"

    def fill_special(self, mask: np.ndarray) -> bool:
        """Writes the mask, u32[words], if it isn't the grammar's; False if it is."""
        if self._forced:
            mask[:] = self._vocabulary.bits(self._forced[:1])
        return bool(self._forced or self.error)

    def finish_mask(self, mask: np.ndarray) -> None:
        """Looks after the mask that the grammar filled: takes out the ends of text that the request
        ignores, unless nothing else is left."""
        if self._ll.is_error():
            self._fail()
            mask[:] = 0xFFFFFFFF  # whatever is sampled ends the sequence
        elif self._not_hidden is not None and (mask & self._not_hidden).any():
            mask &= self._not_hidden

    def _fail(self) -> None:
        self.error = f"the grammar can't be followed: {short_message(self._ll.get_error())}"

    def _finds_way(self, left: int) -> bool:
        """Whether the text can be completed within `left` tokens, as far as a search shows.

        Keeps the way. Where there was none before, there is no use in searching at each token.
        """
        if self._way is not None:
            for start in range(min(3, len(self._way) + 1)):
                way = self._way[start:]
                if len(way) <= left and leads_to_end(self._ll, way):
                    self._way = way
                    return True
        elif left > self._search_at:
            return False
        way = find_end(self._ll, self._vocabulary, left, SEARCH_NODES)
        if way is None:
            self._search_at = left // 2
            return False
        self._way = way
        return True


def leads_to_end(ll: llguidance.LLMatcher, way: Sequence[int]) -> bool:
    """Whether the text is complete after these tokens."""
    trial = ll.deep_copy()
    return trial.try_consume_tokens(list(way)) == len(way) and trial.is_accepting()


def find_end(
    ll: llguidance.LLMatcher, vocabulary: Vocabulary, limit: int, max_nodes: int
) -> list[int] | None:
    """Tokens, at most `limit`, that complete the text; not always the fewest. None: none found.

    Dives along the tokens that close most; then again with one other choice in a place, the places
    nearest first, and so on (limited discrepancy search, Harvey and Ginsberg, IJCAI 1995). Looks
    for short ways before long ones.
    """
    bound, nodes_left = FIRST_BOUND, max_nodes
    while True:
        bound = min(bound, limit)
        nodes = min(nodes_left, NODES_PER_TOKEN * bound)
        way = _search(ll, vocabulary, bound, nodes)
        nodes_left -= nodes
        if way is not None or bound == limit or nodes_left <= 0:
            return way
        bound *= 4


def _search(
    ll: llguidance.LLMatcher, vocabulary: Vocabulary, limit: int, max_nodes: int
) -> list[int] | None:
    starts: list[list[int]] = [[]]
    mask = np.zeros(vocabulary.num_words, np.uint32)
    nodes = 0
    for start in starts:  # grows
        path, trial = list(start), ll.deep_copy()
        if trial.try_consume_tokens(path) < len(path):
            continue
        before, repeats, seen = b"", 0, collections.Counter[bytes]()
        while True:
            nodes += 1
            if trial.is_accepting():
                return path
            if len(path) >= limit or nodes >= max_nodes or trial.is_stopped():
                break
            if forced := trial.compute_ff_tokens()[: limit - len(path)]:
                path += forced
                trial.consume_tokens(forced)
                continue
            trial.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            now = mask.tobytes()
            repeats = repeats + 1 if now == before else 0
            before = now
            seen[now] += 1
            if repeats in SCAN_AT:
                token, tried = _scan(trial, vocabulary, mask, seen)
                nodes += tried
                if token is not None:
                    path.append(token)
                    trial.consume_token(token)
                    continue
            choices = vocabulary.closers(mask, 4)
            if not choices:
                break
            starts += [[*path, other] for other in choices[1:]]
            path.append(choices[0])
            trial.consume_token(choices[0])
        if nodes >= max_nodes:
            return None
    return None


def _scan(
    trial: llguidance.LLMatcher,
    vocabulary: Vocabulary,
    mask: np.ndarray,
    seen: collections.Counter[bytes],
) -> tuple[int | None, int]:
    """A character that changes what may follow, as in a text that must hold a certain one; and how
    many were tried. The one whose successors have been `seen` least on the way."""
    best, least = None, 0
    before, after = mask.tobytes(), np.zeros_like(mask)
    characters = vocabulary.characters(mask)
    for count, token in enumerate(characters, start=1):
        child = trial.deep_copy()
        child.consume_token(token)
        child.unsafe_compute_mask_ptr(after.ctypes.data, after.nbytes)
        successors = after.tobytes()
        if successors == before:
            continue
        if not seen[successors]:
            return token, count
        if best is None or seen[successors] < least:
            best, least = token, seen[successors]
    return best, len(characters)


def short_message(error: str) -> str:
    """The library's message without the dump of its state."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line)[:300]
