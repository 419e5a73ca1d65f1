"""Looks into the engine that many may ask for: one at a time, and not too often. Imports no jax."""

import asyncio
import time
from collections.abc import Callable

from jaxserve.observation import EngineState


class EngineView:
    """The engine's latest state. Whoever asks while a look is under way shares it.

    A look takes the engine about a millisecond, so there are at most 1 / MAX_AGE_S a second.
    """

    MAX_AGE_S = 0.4

    def __init__(self, ask: Callable[[], None]):
        """`ask` has the engine send its state, which is to come to `deliver`."""
        self._ask = ask
        self._coming: asyncio.Future[EngineState] | None = None
        self._last: EngineState | None = None
        self._last_s = 0.0

    async def get(self) -> EngineState:
        """Raises: what `ask` raises, and what `fail` is told."""
        if self._last is not None and time.monotonic() - self._last_s < self.MAX_AGE_S:
            return self._last
        if self._coming is None:
            self._ask()
            self._coming = asyncio.get_running_loop().create_future()
            # those who wait may all have gone by the time that it fails
            self._coming.add_done_callback(lambda future: future.exception())
        return await asyncio.shield(self._coming)

    def deliver(self, state: EngineState) -> None:
        self._last, self._last_s = state, time.monotonic()
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.set_result(state)

    def fail(self, error: Exception) -> None:
        """No state will come any more."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.set_exception(error)
