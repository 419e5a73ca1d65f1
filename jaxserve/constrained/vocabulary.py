"""The model's tokens as grammars see them. Imports no jax."""

import re
from collections.abc import Sequence

import llguidance
import numpy as np

MANY = 4096
"""How many tokens, most wanted first, `closers` looks at before it looks at all."""
EMPTY, QUOTES, VALUES = 32, 64, 96
"""Ranks from which on tokens are an empty structure or a comma, a string's quote, a value."""

_CLOSERS = re.compile(rb"""[\]})>]["\]})>]*""")
_QUOTES = re.compile(rb"""["][\]})>]*""")
_EMPTY = re.compile(rb"""(\[\]|\{\}|\(\)|"")[\]},)]*|[\]},)]+"?""")
_VALUES = re.compile(rb"[0-9]|null|true|false")
_PUNCTUATION = re.compile(rb"""[\[\]{}():,"<>/;=.]+""")
_WORD = re.compile(rb"[A-Za-z0-9]+")


class Vocabulary:
    """Tokens as bytes, which of them end a text, and in which order to try them to end one soon."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int], vocab_size: int):
        """`tokenizer_json`: as Hugging Face's tokenizers write it. `vocab_size`: the model's; ids
        that are no token are never allowed."""
        ids = sorted(i for i in eos_token_ids if i < vocab_size)
        try:
            self.tokenizer = llguidance.LLTokenizer(tokenizer_json, vocab_size, ids or None)
        except ValueError:
            # Tokens that the model doesn't know: it will not be asked for them.
            self.tokenizer = llguidance.LLTokenizer(tokenizer_json, None, ids or None)
        self.vocab_size = vocab_size
        self.num_words = -(-self.tokenizer.vocab_size // 32)
        """Of a mask as the library fills it, u32 each."""
        self.eos_token_ids = frozenset(self.tokenizer.eos_tokens)
        rank = np.array([self._rank(i) for i in range(vocab_size)], np.int32)
        # Within a string a bracket is text like any other, and only a quote ends it.
        is_quote = (rank >= QUOTES) & (rank < VALUES)
        within_text = np.where(is_quote, VALUES - rank, VALUES + rank)
        self._ranks = (rank, within_text)
        characters = [i for i in range(vocab_size) if self._is_character(i)]
        self._characters = np.array(sorted(characters, key=lambda i: rank[i]), np.int64)
        self._wanted = tuple(np.argsort(r, kind="stable")[:MANY] for r in self._ranks)

    def is_special(self, text: str) -> bool:
        """Whether the text is one special token."""
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        return len(ids) == 1 and self.tokenizer.is_special_token(ids[0])

    def bits(self, token_ids: Sequence[int]) -> np.ndarray:
        """A mask of these tokens alone."""
        mask = np.zeros(self.num_words, np.uint32)
        for token in token_ids:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def closers(self, mask: np.ndarray, most: int) -> list[int]:
        """Allowed tokens that bring a text to its end soonest, as far as their spelling tells: ends
        of structures, empty ones, short values; the most promising first."""
        is_text = int(np.bitwise_count(mask).sum()) > max(64, self.vocab_size // 16)
        wanted, rank = self._wanted[is_text], self._ranks[is_text]
        allowed = wanted[_is_set(mask, wanted)][:most]
        if len(allowed) < most:
            words = np.flatnonzero(mask)
            bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
            row, bit = np.nonzero(bits)
            every = words[row] * 32 + bit
            every = every[every < self.vocab_size]
            allowed = every[np.argsort(rank[every], kind="stable")][:most]
        return allowed.tolist()

    def characters(self, mask: np.ndarray) -> list[int]:
        """Allowed tokens of one ASCII character; without the backslash, which only begins another
        way to write the same."""
        return self._characters[_is_set(mask, self._characters)].tolist()

    def _is_character(self, token: int) -> bool:
        spelling = self.tokenizer.decode_bytes([token])
        return len(spelling) == 1 and 0x20 <= spelling[0] < 0x7F and spelling != b"\\"

    def _rank(self, token: int) -> int:
        spelling = self.tokenizer.decode_bytes([token])
        size = min(len(spelling), 32)
        if self.tokenizer.is_special_token(token) or not spelling:
            return 1000
        if _CLOSERS.fullmatch(spelling):
            return EMPTY - size
        if _EMPTY.fullmatch(spelling):
            return QUOTES - size
        if _QUOTES.fullmatch(spelling):
            return QUOTES + size - 1
        if _VALUES.fullmatch(spelling):
            return VALUES + size
        if _PUNCTUATION.fullmatch(spelling):
            return 300 + size
        if _WORD.fullmatch(spelling):
            return 432 - size
        return 600 if spelling.isspace() else 532 - size


def _is_set(mask: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    return (mask[token_ids >> 5] >> (token_ids & 31).astype(np.uint32)) & 1 == 1
