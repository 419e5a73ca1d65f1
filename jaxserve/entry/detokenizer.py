"""Text of a sequence as its tokens arrive: whole characters only, and nothing of a stop string.

Each token is a fixed run of bytes, so that a sequence's text is the UTF-8 of its tokens' bytes, and
an incremental decoder gives it piece by piece at constant cost per token, whatever the tokens are.
Stop strings are found by one automaton over characters (Aho and Corasick, Efficient string
matching, 1975), whose state also says how much of the text's end could still become a stop string
and must wait.
"""

import codecs
from collections.abc import Sequence

import regex

from jaxserve.entry.stop_patterns import PatternScanner
from jaxserve.entry.tokenizer import Tokenizer


class StopAutomaton:
    """All stop strings of a request. Immutable: choices of the same request share one."""

    def __init__(self, stops: Sequence[str]):
        self.next: list[dict[str, int]] = [{}]
        """Per state, character to state; a character that is not there goes by `fail`."""
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        """The longest stop string that ends in this state."""
        self.held: list[int] = [0]
        """How many of the last characters may be the beginning of a stop string."""
        for stop in stops:
            state = 0
            for character in stop:
                state = self._child(state, character)
            self.match[state] = stop
        self._link()

    def _child(self, state: int, character: str) -> int:
        child = self.next[state].get(character)
        if child is None:
            child = self.next[state][character] = len(self.next)
            self.next.append({})
            self.fail.append(0)
            self.depth.append(self.depth[state] + 1)
            self.match.append(None)
            self.held.append(0)
        return child

    def _link(self) -> None:
        """Breadth first, so that a state's shorter suffixes are done before it."""
        level = [0]
        while level:
            for state in level:
                for character, child in self.next[state].items():
                    self.fail[child] = self.step(self.fail[state], character) if state else 0
                    suffix = self.fail[child]
                    if self.match[child] is None:
                        self.match[child] = self.match[suffix]
                    self.held[child] = self.depth[child] if self.next[child] else self.held[suffix]
            level = [child for state in level for child in self.next[state].values()]

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


class Detokenizer:
    """The text of one choice. `push` takes tokens in order; what it returns never changes
    afterwards.

    A text ends before the stop string that is complete first (of several that are complete at the
    same character, the longest), so that it does not depend on how tokens arrive. Bytes that are no
    UTF-8 become U+FFFD, except a character that is incomplete at the end: it is left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: StopAutomaton | None = None,
        min_tokens: int = 0,
        *,
        patterns: "Sequence[regex.Pattern[str]]" = (),
        keep_stop: bool = False,
        skip_special: bool = True,
    ):
        """`min_tokens`: stop strings that are complete before this many tokens are text like any
        other. `patterns` end the text as stop strings do; with `keep_stop` what ended it is its
        last part. `skip_special`: special tokens are no text.
        """
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._special = tokenizer.special_token_ids
        self._patterns = PatternScanner(patterns) if patterns else None
        self._keep_stop = keep_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self._num_tokens = 0
        self._strip_space = tokenizer.strips_first_space
        self.stop_reason: str | None = None
        """The stop string, or what a pattern matched, that ended the text. Later tokens are
        ignored."""
        self._read_prompt(prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens pushed, up to the one that completed a stop string."""
        return self._num_tokens

    def _read_prompt(self, token_ids: Sequence[int]) -> None:
        """A character that the prompt's last tokens leave incomplete is completed by, and shown
        with, the first new ones.
        """
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._special:
                tail = self._bytes_of(token_id) + tail
                self._strip_space = False
                if len(tail) >= 4:
                    break
        for length in (1, 2, 3):
            piece = tail[-length:]
            if len(piece) == length and piece[0] >= 0xC0:
                self._decode(piece)
                if self._decoder.getstate()[0] != piece:
                    self._decoder.reset()
                return

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now. Stops at the token that completes a stop string: see
        `stop_reason`.
        """
        pieces = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self._num_tokens += 1
            if token_id in self._skipped:
                continue
            token_bytes = self._bytes_of(token_id)
            if token_id not in self._special and self._strip_space and token_bytes:
                token_bytes = token_bytes.removeprefix(b" ")
                self._strip_space = False
            text = self._decode(token_bytes)
            if text:
                pieces.append(self._scan(text))
        return "".join(pieces)

    def _decode(self, token_bytes: bytes) -> str:
        """The characters that are certain; keeps bytes that may still become one."""
        text = self._decoder.decode(token_bytes)
        kept = self._decoder.getstate()[0]
        if kept[:1] == b"\xed" and kept[1:] >= b"\xa0":
            # the beginning of a surrogate, which Python keeps although no UTF-8 has any
            text += self._decoder.decode(b"", True)
        return text

    def finish(self) -> str:
        """The text that was held back, when no more tokens come."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str) -> str:
        """Looks for what ends the text; returns what is certain, keeps the rest in `_held`."""
        stops, patterns = self._stops, self._patterns
        if stops is None and patterns is None:
            return text
        honoured = self._num_tokens >= self._min_tokens
        state = self._state
        follow, matches = ([], []) if stops is None else (stops.next, stops.match)
        for index, character in enumerate(text):
            length = 0
            if stops is not None:
                known = follow[state].get(character)
                state = known if known is not None else stops.step(state, character)
                if matches[state] is not None and honoured:
                    length = len(matches[state] or "")
            if patterns is not None:
                length = max(length, patterns.push(character, honoured))
            if length:
                known_text = self._held + text[: index + 1]
                self._held = ""
                end = len(known_text) - length
                self.stop_reason = known_text[end:]
                return known_text if self._keep_stop else known_text[:end]
        self._state = state
        known_text = self._held + text
        held = 0 if stops is None else stops.held[state]
        certain = len(known_text) - max(held, 0 if patterns is None else patterns.held)
        self._held = known_text[certain:]
        return known_text[:certain]
