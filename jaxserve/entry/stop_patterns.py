"""Stop conditions given as regular expressions, found as a text grows. Imports no jax.

A text ends before the match that is complete first. What could still become a match is held back:
the `regex` library says of a text's end whether it begins one (a partial match). An expression sees
the text so far and nothing after it, so `$` and lookahead take the present end for the text's end.
"""

from collections.abc import Sequence
from typing import Any

import regex

from jaxserve.types import InvalidRequest

MAX_HELD = 8192
"""Characters held back for a match that may still come; older ones are let go as text."""
TIMEOUT_S = 0.2
"""Of one look at the text. An expression that takes longer (exponential backtracking) fails its
request."""


def compile_patterns(sources: Sequence[str]) -> tuple["regex.Pattern[str]", ...]:
    """Raises: InvalidRequest for what is no regular expression, or matches the empty text."""
    patterns = []
    for source in sources:
        try:
            pattern = regex.compile(source)
            if pattern.fullmatch("", timeout=TIMEOUT_S) is not None:
                raise InvalidRequest(
                    "stop_regex", f"has {source!r}, which matches the empty text: it stops nothing"
                )
        except (regex.error, RecursionError, TimeoutError, OverflowError) as error:
            raise InvalidRequest(
                "stop_regex", f"has {source!r}, which is no regular expression: {error}"
            ) from error
        patterns.append(pattern)
    return tuple(patterns)


class PatternScanner:
    """Looks for the patterns of one choice, character by character."""

    def __init__(self, patterns: "Sequence[regex.Pattern[str]]"):
        self._patterns = patterns
        self._text = ""
        """The end of the text, with what lookbehind and `^` need to see."""
        self._start = 0
        """Where in it a match may begin."""

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a match."""
        return len(self._text) - self._start

    def push(self, character: str, honoured: bool) -> int:
        """Length of the match that this character completes, the longest of several; 0: none.

        One that is not `honoured` is text like any other.
        Raises: InvalidRequest if a pattern takes too long.
        """
        self._text += character
        text, end = self._text, len(self._text)
        length = held = 0
        try:
            for pattern in self._patterns:
                match: Any = pattern.search(text, self._start, partial=True, timeout=TIMEOUT_S)
                if match is not None and match.partial:
                    held = max(held, end - match.start())
                    # It may hide a later one that is complete.
                    match = pattern.search(text, self._start, timeout=TIMEOUT_S)
                if match is not None:
                    length = max(length, end - match.start())
        except TimeoutError:
            raise InvalidRequest("stop_regex", f"takes over {TIMEOUT_S} s to look for") from None
        self._start = end if length else end - min(held, MAX_HELD)
        if end > 4 * MAX_HELD:
            cut = end - 2 * MAX_HELD
            self._text, self._start = text[cut:], self._start - cut
        return length if honoured else 0
