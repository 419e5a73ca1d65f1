"""A server's life: start, restart, drain, signals, ports; over a fake engine, and once as a
process.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import grpc.aio
import httpx
import pytest
from server_fakes import (
    REPLY,
    FakeEngine,
    Served,
    fake_client_maker,
    finish,
    serving,
    serving_grpc,
    serving_http,
)

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry import progress, serve
from jaxserve.entry.progress import StartupDisplay
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc
from jaxserve.entry.serve import Server
from jaxserve.messages import Progress
from jaxserve.types import ConfigError, EngineDead

LONG = {"prompt": "a", "max_tokens": 200}


def slow(engine: FakeEngine) -> None:
    engine.step_s = 0.01


async def stopped(served: Served) -> int:
    async with asyncio.timeout(5):
        return await served.task


async def test_it_says_what_it_serves():
    async with serving_http(served_model_name="my-model") as (served, http):
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "my-model"
        assert (await http.get("/health")).json() == {"status": "ok"}
    lines = served.out.getvalue().splitlines()
    assert f"HTTP      {served.url}" in lines
    assert f"gRPC      {served.target}" in lines
    assert "compile   2/2 mixed 64" in lines
    assert any("64 pages of 16 tokens = 1,024 tokens" in line for line in lines)
    assert (
        "compiled  2 programs in 0.1 s, 1 kept from before (read in 0.1 s), 1 traced in 0.3 s, "
        "1 compiled in 0.2 s of threads; weights loaded in 0.1 s; ready after 0.2 s"
    ) in lines
    assert lines[-2:] == ["ready", "stopped"]
    assert served.task.result() == 0


async def test_without_a_grpc_port_there_is_none():
    async with serving(grpc_port=None) as served:
        assert served.server.addresses is not None
        assert served.server.addresses.grpc_port is None


async def test_running_requests_may_finish():
    async with serving_http(set_up=slow, grace_s=5.0) as (served, http):
        body = {"prompt": "a", "max_tokens": 40}
        whole = asyncio.ensure_future(http.post("/v1/completions", json=body))
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            served.server.stop()
            text = "".join([part async for part in stream.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")
        assert (await whole).status_code == 200
        assert await stopped(served) == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_requests_that_outlast_the_grace_period_are_told():
    async with serving(set_up=slow, grace_s=0.3) as served:
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=10) as http,
            grpc.aio.insecure_channel(served.target) as channel,
        ):
            whole = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
            stub = jaxserve_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=200))
            )
            await call.read()
            async with http.stream(
                "POST", "/v1/completions", json={**LONG, "stream": True}
            ) as stream:
                served.server.stop()
                lines = [line async for line in stream.aiter_lines() if line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert error["code"] == "engine_unavailable"
            assert "shutting down" in error["message"]
            assert (await whole).status_code == 503
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await finish(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await stopped(served) == 0
        assert not served.engine.running


async def test_new_requests_are_refused_while_it_drains():
    async with serving_grpc(set_up=slow, grace_s=5.0) as (served, stub):
        sampling = pb.SamplingParams(max_tokens=30)
        call = stub.Generate(pb.GenerateRequest(text="a", sampling=sampling))
        await call.read()
        served.server.stop()
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="a")).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await finish(call)
        assert await stopped(served) == 0


async def test_a_second_signal_ends_the_grace_period():
    async with serving_http(set_up=slow, grace_s=60.0) as (served, http):
        whole = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await asyncio.sleep(0.1)
        served.server.stop()
        await asyncio.sleep(0.05)
        served.server.stop()
        assert (await whole).status_code == 503
        assert await stopped(served) == 0


async def test_an_idle_or_silent_connection_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "CLOSE_S", 0.3)
    async with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        idle = await asyncio.open_connection(host, port)
        half = await asyncio.open_connection(host, port)
        half[1].write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n")
        half[1].write(b"content-type: application/json\r\n\r\n{")
        await asyncio.sleep(0.05)
        served.server.stop()
        assert await stopped(served) == 0
        for _, writer in (idle, half):
            writer.close()


async def test_a_dead_engine_ends_the_server_with_an_error():
    async with serving(set_up=slow) as served:
        served.engine.die()
        assert await stopped(served) == 1


async def test_a_dead_engine_is_replaced_if_so_configured():
    async with serving_http(set_up=slow, restart_engine=True) as (served, http):
        whole = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await asyncio.sleep(0.1)
        served.engine.die()
        assert (await whole).status_code == 503
        async with asyncio.timeout(5):
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        assert len(served.engines) == 2
        answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.json()["choices"][0]["text"] == REPLY[:5]
        metrics = (await http.get("/metrics")).text
        assert 'jaxserve_generation_tokens_total{model_name="tiny"} 5.0' in metrics


async def test_it_gives_up_on_engines_that_keep_dying(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "MAX_RESTARTS", 2)

    def doomed(engine: FakeEngine) -> None:
        asyncio.get_running_loop().call_later(0.05, engine.die)

    async with serving(set_up=doomed, restart_engine=True) as served:
        assert await stopped(served) == 1
        assert len(served.engines) == 3


async def test_stop_while_it_starts():
    def never_ready(engine: FakeEngine) -> None:
        while not engine._out.empty():
            engine._out.get_nowait()

    make_client = fake_client_maker([], never_ready)
    server = Server(
        EngineConfig(model="tiny"), ServerConfig(port=0), make_client=make_client, out=io.StringIO()
    )
    task = asyncio.ensure_future(server.run())
    await asyncio.sleep(0.1)
    server.stop()
    async with asyncio.timeout(5):
        assert await task == 0


async def test_an_engine_that_does_not_start():
    def dead(engine: FakeEngine) -> None:
        while not engine._out.empty():
            engine._out.get_nowait()
        engine.die()

    make_client = fake_client_maker([], dead)
    server = Server(
        EngineConfig(model="tiny"), ServerConfig(port=0), make_client=make_client, out=io.StringIO()
    )
    with pytest.raises(EngineDead):
        await server.run()


async def test_a_taken_port_is_an_error_before_anything_loads():
    engines: list[FakeEngine] = []
    make_client = fake_client_maker(engines, slow)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for config in (ServerConfig(port=port), ServerConfig(port=0, grpc_port=port)):
            server = Server(
                EngineConfig(model="tiny"), config, make_client=make_client, out=io.StringIO()
            )
            with pytest.raises(ConfigError, match=str(port)):
                await server.run()
    assert engines == []


def test_a_host_that_is_none():
    with pytest.raises(ConfigError, match="no address"):
        serve.bind("not a host", 0)


def test_default_host_is_loopback_and_ipv6_works():
    assert ServerConfig().host == "127.0.0.1"
    with contextlib.closing(serve.bind("::1", 0)) as sock:
        assert sock.getsockname()[0] == "::1"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_bars_and_elsewhere_lines():
    for out in (Terminal(), io.StringIO()):
        with StartupDisplay(out) as display:
            display.show(Progress("load", "weights read in 1.0 s"))
            for done in range(1, 51):
                display.show(Progress("compile", f"step {done}", done, 50))
        assert "weights read" in out.getvalue()
        assert "50/50" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 3  # the load, the first and the last step


def test_a_start_that_takes_long_is_told_where_there_is_no_terminal(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    told = io.StringIO()
    with StartupDisplay(told, quiet_s=5.0) as display:
        display.show(Progress("setup", "tiny"))
        for done in range(25):
            display.show(Progress("compile", f"step {done}", done, 100))
            now_s += 1
    lines = told.getvalue().splitlines()
    assert lines == [f"compile   {n}/100 step {n}" for n in (5, 10, 15, 20)]


PROCESS = """
import sys
sys.path.insert(0, "tests/entry")
from server_fakes import fake_client_maker, REPLY
from jaxserve.entry import serve, cli
serve.Server.__init__.__kwdefaults__["make_client"] = fake_client_maker([], lambda e: None)
sys.argv = ["jaxserve", "serve", "tiny", "--port", "0", "--grpc-port", "0"]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_stops_cleanly_on_signals(number: signal.Signals):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROCESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as process:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if line.startswith("HTTP"):
                url = line.split()[1]
            if line.strip() == "ready":
                break
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 5}, timeout=10
        )
        assert answer.json()["choices"][0]["text"] == REPLY[:5]
        started_s = time.monotonic()
        process.send_signal(number)
        out, errors = process.communicate(timeout=10)
        assert time.monotonic() - started_s < 6
        assert process.returncode == 0, errors
        assert out.splitlines()[-1] == "stopped"
        assert "POST /v1/completions cmpl-" in errors
        assert "Traceback" not in errors


def test_the_entry_process_imports_no_jax():
    code = (
        "import sys, jaxserve.entry.serve, jaxserve.entry.cli, jaxserve.entry.llm\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_server_setting_has_help():
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"]
