"""Which tokens a row may sample, decided on the host from the tokens so far: one bit a token.

A mask is u32[ceil(V/32)]: bit v%32 of word v//32 says whether token v may be sampled. The loop
packs a step's sampling after it has committed the step before, so all tokens up to the one to be
sampled are known here, under overlap too.
"""

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.scheduler.sequence import Sequence as Generation
from jaxserve.types import TokenSampling


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def all_allowed(*shape: int) -> np.ndarray:
    return np.full(shape, 0xFFFFFFFF, np.uint32)


def forbid(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clears the bits of `token_ids`."""
    for token in token_ids:
        mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def only(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """A mask of these tokens."""
    bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class BadWords:
    """Runs of tokens that the output must not have.

    The last token of one is forbidden where the output ends in the others (as in vLLM: a run that
    begins in the prompt is none).
    """

    def __init__(self, words: Iterable[Sequence[int]]):
        self.single = [word[0] for word in words if len(word) == 1]
        """Forbidden everywhere."""
        self._by_tail: dict[int, list[tuple[tuple[int, ...], int]]] = collections.defaultdict(list)
        """The last token but one of each longer run, to (all but the last, the last)."""
        for word in words:
            if len(word) > 1:
                self._by_tail[word[-2]].append((tuple(word[:-1]), word[-1]))

    def forbidden(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Tokens that would complete a run of two or more; the output begins at `start`."""
        if len(token_ids) <= start:
            return []
        return [
            last
            for prefix, last in self._by_tail.get(token_ids[-1], ())
            if len(prefix) <= len(token_ids) - start and tuple(token_ids[-len(prefix) :]) == prefix
        ]


class RepeatedRuns:
    """Tokens that would repeat a run of `size` tokens of prompt and output, as in Hugging Face."""

    def __init__(self, size: int):
        self._size = size
        self._num_seen = 0
        self._followers: dict[tuple[int, ...], set[int]] = collections.defaultdict(set)
        """What came after each run of size - 1 tokens."""

    def forbidden(self, token_ids: Sequence[int]) -> set[int]:
        """`token_ids` are those of the call before, and further ones."""
        before = self._size - 1
        for at in range(max(self._num_seen, before), len(token_ids)):
            self._followers[tuple(token_ids[at - before : at])].add(token_ids[at])
        self._num_seen = len(token_ids)
        if len(token_ids) < before:
            return set()
        return self._followers.get(tuple(token_ids[len(token_ids) - before :]), set())


class RowMask:
    """The mask of one sequence's rows, while it has its slot."""

    def __init__(self, sequence: Generation, vocab_size: int):
        sampling = sequence.request.sampling
        self._sequence = sequence
        self._bad_words = BadWords(sampling.bad_words)
        size = sampling.no_repeat_ngram_size
        self._runs = RepeatedRuns(size) if size else None
        if sampling.allowed_token_ids is None:
            self._base = all_allowed(mask_words(vocab_size))
        else:
            self._base = only(sampling.allowed_token_ids, vocab_size)
        forbid(self._base, self._bad_words.single)
        self._may_stop_at = sequence.num_prompt + sampling.min_tokens

    def fill(self, position: int, out: np.ndarray) -> None:
        """Writes to `out` which tokens the row may sample at `position`."""
        sequence = self._sequence
        token_ids = sequence.token_ids
        assert len(token_ids) == position or sequence.status == "finished", sequence
        out[:] = self._base
        if position < self._may_stop_at:
            forbid(out, sequence.request.sampling.stop_token_ids)
        forbid(out, self._bad_words.forbidden(token_ids, sequence.num_prompt))
        if self._runs is not None:
            forbid(out, self._runs.forbidden(token_ids))


def needs_mask(sampling: TokenSampling) -> bool:
    """Whether rows of the request have a mask at every token (`min_tokens` asks for one early
    on)."""
    return bool(
        sampling.bad_words
        or sampling.no_repeat_ngram_size
        or sampling.allowed_token_ids is not None
    )
