"""Where an engine runs: in a thread of this process, or in a process of its own. Imports jax only
inside the engine.

An engine process gets its config as one line of JSON on its standard input, which then stays open:
when it closes, the process that started it has gone, and the engine ends itself.
"""

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import socket
import sys
import threading
from typing import Literal

from jaxserve import messages
from jaxserve.config import EngineConfig, MeshConfig
from jaxserve.types import CheckpointError, ConfigError, UnsupportedModel

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""How long an engine may take to end after its grace, before its process is killed."""


class EngineHandle:
    """A started engine: its link, and a future that is done when it has ended."""

    def __init__(self, client_end: messages.ClientEnd, exited: asyncio.Future[int]):
        self.client_end = client_end
        self.exited = exited
        """Exit code: 0 after a Shutdown, else the engine died."""
        self._process: asyncio.subprocess.Process | None = None

    async def close(self, grace_s: float = 0.0, *, at_once: bool = False) -> None:
        """Ends the engine after `grace_s` at most and waits for it. Safe to call twice.

        `at_once`: a process is killed, as it has nothing to finish (it was only starting).
        """
        if at_once and self._process is not None and not self.exited.done():
            self._process.kill()
            await asyncio.wait([self.exited], timeout=STOP_TIMEOUT_S)
        if not self.exited.done():
            self.client_end.send(messages.Shutdown(grace_s))
            done, _ = await asyncio.wait([self.exited], timeout=grace_s + STOP_TIMEOUT_S)
            if not done and self._process is not None:
                log.warning("the engine did not stop in time; killing it")
                self._process.kill()
                await asyncio.wait([self.exited], timeout=STOP_TIMEOUT_S)
        self.client_end.close()


async def start_engine(config: EngineConfig, process: Literal["thread", "spawn"]) -> EngineHandle:
    """Starts an engine; its link tells Progress, then Ready or Fatal. Call within the asyncio loop
    that will use it."""
    if process == "thread":
        return _start_thread(config)
    return await _start_process(config)


def _start_thread(config: EngineConfig) -> EngineHandle:
    loop = asyncio.get_running_loop()
    link = messages.QueueEngineEnd()
    client_end = link.connect()
    exited: asyncio.Future[int] = loop.create_future()

    def finish(code: int) -> None:
        if not exited.done():
            exited.set_result(code)

    def body() -> None:
        code = run_engine(config, link)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(finish, code)

    threading.Thread(target=body, name="jaxserve-engine", daemon=True).start()
    return EngineHandle(client_end, exited)


async def _start_process(config: EngineConfig) -> EngineHandle:
    own, other = socket.socketpair()
    client_end = await messages.SocketClientEnd.open(own)
    setup = {
        "link": other.fileno(),
        "config": dataclasses.asdict(config),
        "log_level": log.getEffectiveLevel(),
    }
    try:
        with other:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jaxserve.engine.process",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(other.fileno(),),
                # a terminal's Ctrl-C is for the entry process, which then stops the engine in order
                start_new_session=True,
            )
    except BaseException:
        client_end.close()
        raise
    handle = EngineHandle(client_end, asyncio.ensure_future(process.wait()))
    handle._process = process
    assert process.stdin is not None
    process.stdin.write(json.dumps(setup).encode() + b"\n")
    with contextlib.suppress(ConnectionError):  # it has ended, which `exited` tells
        await process.stdin.drain()
    return handle


def run_engine(config: EngineConfig, link: messages.EngineEnd, *, freeze: bool = False) -> int:
    """Runs an engine to its end and returns its exit code. Whatever ends it is told over the link
    first.

    `freeze`: keeps all objects that there are after the start from Python's garbage collection,
    which stops the loop for 0.1 s when it looks through them (300,000 objects, most of them JAX's).
    For a process that runs nothing else.
    """
    from jaxserve.engine.start import start

    try:
        engine = start(config, link)
        if freeze:
            gc.collect()
            gc.freeze()
        engine.run()
        return 0
    # The boundary: every error must reach the clients before the engine is gone.
    except Exception as error:
        if not isinstance(error, ConfigError | CheckpointError | UnsupportedModel):
            log.exception("the engine ends because of an error")
        link.send(messages.Fatal(f"{type(error).__name__}: {error}", type(error).__name__))
        return 1


def _end_with_parent() -> None:
    """Ends this process when standard input closes, that is, when the process that started it has
    gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="jaxserve-parent-watch", daemon=True).start()


def main() -> int:
    setup = json.loads(sys.stdin.readline())
    _end_with_parent()
    logging.basicConfig(
        level=setup["log_level"], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    fields = setup["config"]
    fields["mesh"] = MeshConfig(**fields["mesh"])
    config = EngineConfig(**fields)
    config.prepare_process()
    link = messages.SocketEngineEnd(socket.socket(fileno=setup["link"]))
    code = run_engine(config, link, freeze=True)
    link.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
