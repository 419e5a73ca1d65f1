"""The wire between the entry process and the engine: message structs and the link that carries
them.

The only file that knows bytes. A link has two ends: `EngineEnd` (plain calls, used by the loop's
thread) and `ClientEnd` (asyncio). Two kinds of link: a pair of sockets between processes, a pair of
queues within one. msgpack by msgspec; never pickle.
"""

import asyncio
import contextlib
import queue
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, cast

import msgspec

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


def _decode_array(_: Any, data: bytes) -> "array[int]":
    return array("i", data)


_to_engine = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=_decode_array)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def _plain(value: Any) -> bytes | int | float | str:
    """What the encoder doesn't know by itself: token ids, and values of derived classes, such as
    NumPy's float64, as the plain ones that they are. Raises: TypeError."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{value!r} can't be sent: it is a {type(value).__qualname__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


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


class Turn[T]:
    """Gathers what is sent in one turn of the running loop."""

    def __init__(self, send: Callable[[list[T]], None]):
        """`send` gets the messages after the turn."""
        self._send = send
        self._messages: list[T] = []
        self._loop = asyncio.get_running_loop()

    def add(self, message: T) -> None:
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


LENGTH_BYTES = 8
"""Of what stands before each message on a socket: its length."""
RECEIVED_BYTES = 1 << 18
"""At a time."""
LINGER_S = 2.0
"""How long a closing engine waits for its last words to go out."""


def _frame(message: FromEngine | list[msgspec.Raw]) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class Frames:
    """Takes the bytes that come over a socket apart again."""

    def __init__(self):
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes."""
        self._data += data
        while len(self._data) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "little")
            if len(self._data) < end:
                return
            message = bytes(self._data[LENGTH_BYTES:end])
            del self._data[:end]
            yield message


class SocketEngineEnd:
    """The engine's end of a link between processes: one of a pair of stream sockets.

    Nothing here waits for the client: what it's too slow to take goes out with later calls.
    """

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._socket = end
        self._frames = Frames()
        self._has_ended = False
        """The client's end is closed."""
        self._unsent = bytearray()
        self._sending = threading.Lock()
        """While an engine starts, several threads tell what they do."""

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._flush()
            messages = self._read()
            left_s = None if until_s is None else until_s - time.monotonic()
            if messages or (left_s is not None and left_s <= 0):
                return messages
            poll = select.poll()
            if not self._has_ended:  # which poll would tell again and again
                poll.register(self._socket, select.POLLIN | (select.POLLOUT * bool(self._unsent)))
            poll.poll(None if left_s is None else left_s * 1000)

    def _read(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        size = RECEIVED_BYTES
        while size == RECEIVED_BYTES and not self._has_ended:
            try:
                data = self._socket.recv(RECEIVED_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self._has_ended = not data
            size = len(data)
            for message in self._frames.take(data):
                messages += _to_engine.decode(message)
        return messages

    def send(self, message: FromEngine) -> None:
        data = _frame(message)
        with self._sending:
            self._unsent += data
        self._flush()

    def _flush(self) -> None:
        with self._sending, contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self._socket.send(self._unsent)]
                except ConnectionError:  # nobody is left to tell
                    self._unsent.clear()

    def close(self) -> None:
        self._socket.settimeout(LINGER_S)
        with contextlib.suppress(OSError):
            self._socket.sendall(self._unsent)
        self._socket.close()


class SocketClientEnd(asyncio.Protocol):
    """The entry's end of a link between processes. Made by `open`."""

    def __init__(self):
        self._frames = Frames()
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._turn = Turn(self._send)

    @classmethod
    async def open(cls, end: socket.socket) -> Self:
        """Takes one of a pair of stream sockets; to be used in the loop that runs."""
        end.setblocking(False)
        _, opened = await asyncio.get_running_loop().create_unix_connection(cls, sock=end)
        return opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.take(data):
            self._inbox.put_nowait(message)

    def send(self, message: ToEngine) -> None:
        """Raises: TypeError, here and for this message only, for what can't be sent."""
        self._turn.add(msgspec.Raw(_encode(message)))

    def _send(self, messages: list[msgspec.Raw]) -> None:
        if not self._transport.is_closing():  # the engine has gone, which its exit tells
            self._transport.write(_frame(messages))

    async def receive(self) -> FromEngine:
        return _from_engine.decode(await self._inbox.get())

    def close(self) -> None:
        self._turn.drop()
        self._transport.abort()
