"""`jaxserve serve`: the engine's process, the HTTP and the gRPC server, from start to clean end.

One asyncio loop runs both servers and the engine's client. Imports no jax.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TextIO

import uvicorn
import uvloop

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.client import Client
from jaxserve.entry.front import Front
from jaxserve.entry.grpc_server import GrpcServer, tls_credentials
from jaxserve.entry.http import make_app
from jaxserve.entry.progress import StartupDisplay
from jaxserve.entry.tracing import Tracer
from jaxserve.messages import Progress
from jaxserve.metrics import Metrics
from jaxserve.types import ConfigError, EngineDead, EngineInfo, ProgramCounts

log = logging.getLogger("jaxserve.serve")

KEEP_ALIVE_S = 75
"""How long an idle connection stays open; longer than clients keep theirs in a pool."""
LAST_WORDS_S = 0.5
"""How long a server whose engine died still answers, so that its clients hear of it."""
CLOSE_S = 5.0
"""How long connections may take to close once their requests have ended."""
MAX_RESTARTS = 5
"""Engines that may die within RESTART_WINDOW_S before a server gives up restarting them."""
RESTART_WINDOW_S = 600.0

MakeClient = Callable[[EngineConfig, Metrics, Callable[[Progress], None]], Client]


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where a server listens."""

    host: str
    http_port: int
    grpc_port: int | None


def serve(config: EngineConfig, server: ServerConfig) -> int:
    """Serves until SIGTERM or SIGINT; a second one cuts the grace period short.

    Returns the exit code: 0 after a signal, 1 when the engine died.
    Raises: ConfigError, CheckpointError, UnsupportedModel, EngineDead, OSError from the start.
    """
    set_up_logging(server.log_level, server.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Server(config, server).run())


class JsonLines(logging.Formatter):
    """Each record as one JSON object; what it has in `fields` as keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str, form: str = "text") -> None:
    """Log lines on standard error, from `level` on, as text or JSON."""
    handler = logging.StreamHandler()
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each request has one line, of "jaxserve.access"; the client's own says less.
    if level != "debug":
        logging.getLogger("jaxserve.requests").setLevel(logging.WARNING)
        logging.getLogger("jaxserve.entry.client").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def make_client(
    config: EngineConfig, metrics: Metrics, on_progress: Callable[[Progress], None]
) -> Client:
    return Client(config, process="spawn", observer=metrics, on_progress=on_progress)


class Server:
    """A server's whole life. `run` it in the main thread's loop, once."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        *,
        make_client: MakeClient = make_client,
        out: TextIO | None = None,
    ):
        """`make_client`: another client than the real one. `out`: where progress is told."""
        self.ready: asyncio.Event = asyncio.Event()
        self.addresses: Addresses | None = None
        """Known once `ready`."""
        self.front: Front | None = None
        self.metrics = Metrics()
        self._config = config
        self._server = server
        self._make_client = make_client
        self._out = out or sys.stdout
        endpoint = server.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._deaths: collections.deque[float] = collections.deque()

    def stop(self) -> None:
        """Begins the end, as a signal does; the second call ends the grace period."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def run(self) -> int:
        """As `serve`."""
        with _signals(self.stop), bind(self._server.host, self._server.port) as http_socket:
            self._server.all_api_keys()  # what can fail does so before the load
            tls_credentials(self._server)
            if self._server.grpc_port:
                bind(self._server.host, self._server.grpc_port).close()
            client = await self._start_client()
            if client is None:
                return 0
            try:
                return await self._serve(client, http_socket)
            except BaseException:
                await client.close()
                raise

    async def _start_client(self) -> Client | None:
        """A client whose engine is ready; None if the server is to stop before that."""
        with StartupDisplay(self._out) as display:
            client = self._make_client(self._config, self.metrics, display.show)
            try:
                if await self._unless_stopped(client.start()):
                    self.metrics.serve(self._name(client), client.stats, client.info)
                    return client
            except BaseException:
                await client.close()
                raise
        await client.close()
        return None

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Runs `work` to its end, unless `stop` comes first and cancels it; says which."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _name(self, client: Client) -> str:
        return self._server.served_model_name or client.info.model

    async def _serve(self, client: Client, http_socket: socket.socket) -> int:
        server = self._server
        front = self.front = Front(
            client, self._name(client), logs_text=server.log_text, tracer=self.tracer
        )
        grpc_server = None
        if server.grpc_port is not None:
            grpc_server = GrpcServer(front, server)
            await grpc_server.start()
        http_server = _Uvicorn(
            uvicorn.Config(
                make_app(front, self.metrics, server),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        http_task = asyncio.ensure_future(http_server.serve(sockets=[http_socket]))
        grpc_port = grpc_server.port if grpc_server is not None else None
        self.addresses = Addresses(server.host, http_socket.getsockname()[1], grpc_port)
        self._announce(client.info, self.addresses)
        while not http_server.started and not http_task.done():
            await asyncio.sleep(0.001)
        self._tell("ready")
        self.ready.set()
        try:
            code = await self._watch(front, grpc_server, http_task)
        finally:
            http_server.should_exit = True  # closes its port and idle connections
            if grpc_server is not None:
                await grpc_server.set_healthy(False)
            await self._drain(front)
            # Whoever is still connected has no request that runs.
            if grpc_server is not None:
                await grpc_server.stop(CLOSE_S)
            await asyncio.wait([http_task], timeout=CLOSE_S)
            http_task.cancel()
            await asyncio.gather(http_task, return_exceptions=True)
            if front.client is not None:
                await front.client.close()
            if self.tracer is not None:
                await self.tracer.close()
        self._tell("stopped")
        return code

    async def _watch(
        self, front: Front, grpc_server: GrpcServer | None, http_task: asyncio.Task[None]
    ) -> int:
        """Returns the exit code when the server is to end; starts dead engines anew if it may."""
        while front.client is not None:
            died = asyncio.ensure_future(front.client.wait_dead())
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait((died, stop, http_task), return_when=asyncio.FIRST_COMPLETED)
                if stop.done():
                    return 0
                if http_task.done():
                    http_task.result()
                    return 1
            finally:
                stop.cancel()
                died.cancel()
            died.result()  # why it did is in the client's log line
            if grpc_server is not None:
                await grpc_server.set_healthy(False)
            if not self._may_restart():
                await asyncio.sleep(LAST_WORDS_S)
                return 1
            log.warning("starting the engine anew")
            dead, front.client = front.client, None
            await dead.close()
            try:
                client = await self._start_client()
            except (EngineDead, ValueError) as error:
                log.error("the engine did not start again: %s", error)
                return 1
            if client is None:
                return 0
            front.client, front.info = client, client.info
            if grpc_server is not None:
                await grpc_server.set_healthy(True)
            self._tell("ready again")
        return 1

    def _may_restart(self) -> bool:
        if not self._server.restart_engine:
            return False
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - RESTART_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_RESTARTS:
            log.error("%d engines died in %.0f s; giving up", len(self._deaths), RESTART_WINDOW_S)
            return False
        return True

    async def _drain(self, front: Front) -> None:
        """Lets running requests end, for the grace period at most; a second signal ends that."""
        if front.num_in_flight:
            count, grace_s = front.num_in_flight, self._server.grace_s
            self._tell(f"stopping: {count} requests may go on for {grace_s:g} s")
        await front.drain(self._server.grace_s, self._hurry)

    def _announce(self, info: EngineInfo, addresses: Addresses) -> None:
        mesh = " ".join(f"{name}={size}" for name, size in info.mesh.items() if size > 1)
        host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
        self._tell(
            f"model     {info.model} ({info.model_type}, {info.num_parameters / 1e6:,.1f} M "
            f"parameters, {info.weight_bytes / 1e6:,.0f} MB in {info.dtype}) on {info.device_kind}"
            f"{', mesh ' + mesh if mesh else ''}, attention {info.attention}"
        )
        self._tell(
            f"compiled  {info.num_compiled} programs in {info.compile_s:.1f} s, "
            f"{_origin(info.programs)}; weights loaded in {info.load_s:.1f} s; "
            f"ready after {info.startup_s:.1f} s"
        )
        self._tell(
            f"KV        {info.num_pages:,} pages of {info.page_size} tokens = "
            f"{info.num_pages * info.page_size:,} tokens, {info.kv_bytes / 1e6:,.0f} MB; "
            f"context {info.max_model_len:,}; up to {info.max_num_seqs} sequences a step"
        )
        self._tell(f"HTTP      http://{host}:{addresses.http_port}")
        if addresses.grpc_port is not None:
            tls = "" if self._server.grpc_tls_cert is None else " (TLS)"
            self._tell(f"gRPC      {host}:{addresses.grpc_port}{tls}")

    def _tell(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class _Uvicorn(uvicorn.Server):
    """Uvicorn as one of several things in a loop: signals are not its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet. Raises: ConfigError if it can't be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host is {host!r}, which is no address here: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from None
    return sock


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """Calls `handler` at SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _origin(programs: ProgramCounts) -> str:
    """Where programs came from; seconds are those of all threads together."""
    parts = []
    if programs.num_found:
        parts.append(f"{programs.num_found} kept from before (read in {programs.read_s:.1f} s)")
    if programs.num_traced:
        parts.append(f"{programs.num_traced} traced in {programs.trace_s:.1f} s")
    if programs.num_compiled:
        parts.append(f"{programs.num_compiled} compiled in {programs.compile_s:.1f} s of threads")
    return ", ".join(parts)
