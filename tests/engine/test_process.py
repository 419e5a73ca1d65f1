"""The engine's process: what its start leaves behind."""

import asyncio
import socket

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.process import start_engine


async def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch):
    pairs = []

    def socketpair():
        pairs.append(make())
        return pairs[-1]

    async def fail(*arguments, **options):
        raise OSError("no more processes")

    make = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", socketpair)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(OSError, match="no more processes"):
        await start_engine(EngineConfig("model"), "spawn")
    await asyncio.sleep(0)  # in which the loop closes what was aborted
    [ends] = pairs
    assert [end.fileno() for end in ends] == [-1, -1]
