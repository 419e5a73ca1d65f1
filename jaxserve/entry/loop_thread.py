"""An asyncio loop in a thread, for ordinary code that waits for what runs in it. Imports no jax."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from jaxserve.types import EngineDead

CLOSED = "this engine was closed"


class Call[T]:
    """A coroutine that a loop runs while another thread waits for it.

    Only that one waits, so a lock does: with asyncio.run_coroutine_threadsafe it starts, and its
    result is there, 0.06 ms later each (two cores that were idle).
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]):
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """To be called in the loop."""
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """To be called in the loop, after `start`."""
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        """Waits for it. Raises: what the coroutine raises, CancelledError where it is cancelled."""
        self._running.acquire()
        assert self._task is not None
        return self._task.result()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # which nobody may be there to hear of any more
        self._running.release()


class LoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopping = False
        # A daemon, since the program's end ends it: see `LLM`'s finalizer, which runs after threads
        # are joined.
        self.thread = threading.Thread(target=self._body, name="jaxserve-client", daemon=True)
        self.thread.start()

    def _body(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Has the loop run it. From any thread. Raises: EngineDead once the loop has ended."""
        return self._send(coroutine, lambda: asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. When the waiting is interrupted (Ctrl-C), it is cancelled."""
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RuntimeError("LLM can't be called from its own callbacks; use AsyncLLM")
        call = Call(coroutine)
        self._send(coroutine, lambda: self.loop.call_soon_threadsafe(call.start))
        try:
            return call.result()
        except asyncio.CancelledError:
            raise EngineDead(CLOSED) from None
        except BaseException:
            self.later(call.cancel)
            raise

    def _send[T](self, coroutine: Coroutine[Any, Any, Any], send: Callable[[], T]) -> T:
        with self._lock:
            if self._stopping:
                coroutine.close()
                raise EngineDead(CLOSED)
            return send()

    def later(self, call: Callable[[], object]) -> None:
        """Has the loop call it, unless the loop is ending anyway. From any thread."""
        if not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed in between
                self.loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Ends the loop: what still runs in it is cancelled and waited for."""

        async def cancel_rest() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with self._lock:
            self._stopping = True  # whatever came before is among the tasks by now
        asyncio.run_coroutine_threadsafe(cancel_rest(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def end_loop(loop: LoopThread, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `close` in the loop, then ends it; from any thread."""
    if threading.current_thread() is loop.thread:  # a finalizer may run in any thread
        threading.Thread(target=end_loop, args=(loop, close), name="jaxserve-end").start()
        return
    try:
        loop.run(close())
    finally:
        loop.stop()
