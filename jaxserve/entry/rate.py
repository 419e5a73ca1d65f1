"""How fast a counter grows. Imports no jax."""

import collections

WINDOW_S = 10.0
"""The time that a rate is of."""
POINT_S = 0.5
"""Least time between the points that are kept."""


class RateMeter:
    """The rate of a counter over its last WINDOW_S, from what it was seen at."""

    def __init__(self):
        self._points: collections.deque[tuple[float, int]] = collections.deque()

    def see(self, now_s: float, total: int) -> None:
        if not self._points or now_s - self._points[-1][0] >= POINT_S:
            self._points.append((now_s, total))
            self._forget(now_s)

    def rate(self, now_s: float, total: int) -> float:
        """Per second, with `total` now; 0 when nothing was seen for WINDOW_S."""
        self._forget(now_s)
        if not self._points or now_s <= self._points[0][0]:
            return 0.0
        then_s, then = self._points[0]
        return (total - then) / (now_s - then_s)

    def _forget(self, now_s: float) -> None:
        while self._points and self._points[0][0] < now_s - WINDOW_S:
            self._points.popleft()
