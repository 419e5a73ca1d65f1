"""The wire between the entry process and the engine: message structs and the link that carries
them.

The only file that knows bytes. A link has two ends: `EngineEnd` (plain calls, used by the loop's
thread) and `ClientEnd` (asyncio). Two kinds of link: zmq between processes, a pair of queues within
one. msgpack by msgspec; never pickle.
"""

import asyncio
import contextlib
import queue
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from jaxserve.observation import EngineState
from jaxserve.types import EngineInfo, EngineStats, Request, TokenOutput


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer, which grammars are compiled for; sent once, before any request."""

    tokenizer_json: str
    """In the format of Hugging Face's tokenizers."""
    eos_token_ids: list[int]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends these requests, wherever they are, and gives their pages back. Unknown ids are ignored:
    they have ended."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine: at once, or when all that it holds has finished, `grace_s` at most."""

    grace_s: float = 0.0


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Drops every cached prefix that no running sequence uses."""


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks for the engine's State."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line of what start-up is doing; `done` of `total` where it counts something."""

    stage: str
    text: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What a step brought."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    """The counters after it: now and then, and always when nothing is left to do."""
    admitted: list[tuple[str, float]] = []
    """Requests that it was the first step of, and the seconds they had waited for it."""


class State(msgspec.Struct, frozen=True, tag=True):
    state: EngineState


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine is ending because of an error. `kind` is the error's class name, for errors that
    are the user's."""

    error: str
    kind: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended as it was asked to; nothing comes after this."""


ToEngine = Vocabulary | Submit | Abort | Shutdown | FlushCache | Inspect
FromEngine = Progress | Ready | Outputs | State | Fatal | Stopped

_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_encode = msgspec.msgpack.Encoder().encode


class EngineEnd(Protocol):
    """The engine's end. Used by one thread."""

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """All messages that are there; waits up to `timeout_s` for a first one (0: not at all,
        None: for ever)."""
        ...

    def send(self, message: FromEngine) -> None: ...

    def close(self) -> None: ...


class ClientEnd(Protocol):
    """The entry's end. Used within one asyncio loop."""

    def send(self, message: ToEngine) -> None:
        """Never blocks. What is sent in one turn of the loop comes together: prompts of one call
        begin in the same step."""
        ...

    async def receive(self) -> FromEngine: ...

    def close(self) -> None: ...


class Turn:
    """Gathers what is sent in one turn of the running loop."""

    def __init__(self, send: Callable[[list[ToEngine]], None]):
        """`send` gets the messages after the turn."""
        self._send = send
        self._messages: list[ToEngine] = []
        self._loop = asyncio.get_running_loop()

    def add(self, message: ToEngine) -> None:
        if not self._messages:
            self._loop.call_soon(self._end)
        self._messages.append(message)

    def drop(self) -> None:
        """The link closes: nothing more is sent."""
        self._messages = []

    def _end(self) -> None:
        messages, self._messages = self._messages, []
        if messages:
            self._send(messages)


class QueueEngineEnd:
    """The engine's end of a link within one process."""

    def __init__(self):
        self._inbox: queue.SimpleQueue[list[ToEngine]] = queue.SimpleQueue()
        self._client: QueueClientEnd | None = None

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            messages += self._inbox.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                messages += self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def send(self, message: FromEngine) -> None:
        assert self._client is not None, "the client's end connects before the engine sends"
        self._client.deliver(message)

    def close(self) -> None:
        pass

    def connect(self) -> "QueueClientEnd":
        """The other end; called inside the asyncio loop that will receive."""
        self._client = QueueClientEnd(self._inbox)
        return self._client


class QueueClientEnd:
    """The entry's end of a link within one process. Made inside the asyncio loop that uses it."""

    def __init__(self, outbox: queue.SimpleQueue[list[ToEngine]]):
        self._turn = Turn(outbox.put)
        self._inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def deliver(self, message: FromEngine) -> None:
        """Called by the engine's thread. A loop that has closed has nobody left to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    def send(self, message: ToEngine) -> None:
        self._turn.add(message)

    async def receive(self) -> FromEngine:
        return await self._inbox.get()

    def close(self) -> None:
        self._turn.drop()


class ZmqEngineEnd:
    """The engine's end of a link between processes; connects to the address that the entry
    bound."""

    def __init__(self, address: str):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 2000
        self._socket.connect(address)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)):
            try:
                while True:
                    messages += _to_engine.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
        return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(_encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZmqClientEnd:
    """The entry's end of a link between processes; binds `address` (ipc://...)."""

    def __init__(self, address: str):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        self._pending: set[asyncio.Future[Any]] = set()
        self._turn = Turn(self._send)

    def send(self, message: ToEngine) -> None:
        self._turn.add(message)

    def _send(self, messages: list[ToEngine]) -> None:
        # With no high-water mark a send never waits; the future is kept so that an error in it is
        # not lost.
        future = asyncio.ensure_future(self._socket.send(_encode(messages)))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    async def receive(self) -> FromEngine:
        return _from_engine.decode(await self._socket.recv())

    def close(self) -> None:
        self._turn.drop()
        self._socket.close(linger=0)
        self._context.term()
