"""`jaxserve serve` as a user runs it: its own process, both protocols, signals, a dying engine."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import grpc
import httpx
import openai
import psutil
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc

LIMITS = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 64}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]


class Running:
    """A server process, its addresses, and what it printed."""

    def __init__(self, folder: pathlib.Path, *flags: str):
        command = [sys.executable, "-m", "jaxserve", "serve", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--port=0", "--grpc-port=0", *FLAGS, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self.ready.wait(240):
            self.end()
            pytest.fail("not ready in 240 s:\n" + "\n".join(self.lines))
        text = "\n".join(self.lines)
        assert self.process.poll() is None, text
        self.url = re.search(r"HTTP\s+(\S+)", text).group(1)
        self.target = re.search(r"gRPC\s+(\S+)", text).group(1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.strip() == "ready":
                self.ready.set()
        self.ready.set()

    def engine(self) -> psutil.Process:
        [child] = psutil.Process(self.process.pid).children()
        return child

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    def end(self) -> None:
        """Leaves no process behind, whatever the test did."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self.process.pid).children(recursive=True)]
            self.process.kill()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tiny_folder):
    running = Running(tiny_folder)
    yield running
    running.end()


def gone(pid: int, timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def counters(server: Running) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(r"^(jaxserve_\w+)(?:\{[^}]*\})? (\S+)$", text, re.M)
    }


def settled(server: Running, name: str, value: float) -> bool:
    """Whether a gauge gets to a value within 10 s."""
    for _ in range(200):
        if counters(server)[name] == value:
            return True
        time.sleep(0.05)
    return False


def test_http_grpc_and_python_say_the_same(server, tiny_folder):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(
            model=model, prompt="Hello", max_tokens=20, temperature=0.8, seed=3
        )
        stream = client.completions.create(
            model=model, prompt="Hello", max_tokens=20, temperature=0.8, seed=3, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in stream)
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=10, seed=1
        )
    assert whole.choices[0].text == streamed
    assert whole.usage.completion_tokens == 20 or whole.choices[0].finish_reason == "stop"
    assert chat.choices[0].message.role == "assistant"
    with grpc.insecure_channel(server.target) as channel:
        stub = jaxserve_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="Hello")
        request.sampling.max_tokens, request.sampling.seed = 20, 3
        request.sampling.temperature = 0.8
        by_grpc = "".join(delta.text for delta in stub.Generate(request))
    assert by_grpc == streamed
    with LLM(str(tiny_folder), process="thread", **LIMITS) as llm:
        [local] = llm.generate("Hello", SamplingParams(max_tokens=20, temperature=0.8, seed=3))
    assert local.text == streamed


def test_many_clients_at_once_get_what_one_alone_gets(server):
    def ask(index: int) -> str:
        body = {"prompt": f"Number {index}", "max_tokens": 24, "temperature": 0}
        response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    alone = [ask(i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, range(12))) == alone


def test_a_client_that_goes_away_frees_its_request(server):
    body = {"prompt": "Go on", "max_tokens": 230, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
    assert settled(server, "jaxserve_num_requests_running", 0)
    with grpc.insecure_channel(server.target) as channel:
        request = pb.GenerateRequest(text="Go on")
        request.sampling.max_tokens, request.sampling.ignore_eos = 230, True
        call = jaxserve_pb2_grpc.InferenceStub(channel).Generate(request)
        next(iter(call))
        call.cancel()
    assert settled(server, "jaxserve_num_requests_running", 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ""}, 400),
        ({"prompt": "x" * 300}, 400),
        ({"prompt": "x", "max_tokens": 100000}, 400),
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": "x", "temperature": -1}, 400),
        ({"prompt": "x", "top_p": 0}, 400),
        ({"prompt": "x", "stop": ["s"] * 1000}, 400),
        ({"prompt": [999999]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": "x", "no_such_field": 1}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"prompt": "x", "model": "other"}, 404),
        ({"prompt": "x", "logit_bias": {"5": 101}}, 400),
        ({"prompt": "x", "presence_penalty": 3}, 400),
    ],
)
def test_bad_requests_get_an_error_of_openais_shape_and_harm_nobody(server, body, status):
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code in (status, 422 if status == 400 else status), response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    good = httpx.post(
        server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60
    )
    assert good.status_code == 200


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe", b'{"prompt": "\xed\xa0\x80"}', b"[]", b"NaN"]
)
def test_bytes_that_are_no_request_get_an_error(server, content):
    response = httpx.post(
        server.url + "/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert 400 <= response.status_code < 500, response.text
    assert "message" in response.json()["error"]


def test_sigterm_ends_it_in_order(tiny_folder):
    server = Running(tiny_folder, "--grace-s=30")
    try:
        engine = server.engine().pid
        body = {"prompt": "Go on", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(server.process.pid, signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" or rest[-2] == "data: [DONE]"
        assert server.wait() == 0
        assert gone(engine)
    finally:
        server.end()


def test_a_dead_engine_is_told_to_clients_and_ends_the_server(tiny_folder):
    server = Running(tiny_folder)
    try:
        body = {"prompt": "Go on", "max_tokens": 230, "ignore_eos": True, "stream": True}
        engine = server.engine()  # looked for now: 230 tokens take no longer on a busy machine
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.kill()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "error" in events[-1]
        assert server.wait() != 0
    finally:
        server.end()


def test_an_engine_does_not_outlive_its_server(tiny_folder):
    server = Running(tiny_folder)
    try:
        engine = server.engine().pid
        server.process.kill()
        assert gone(engine)
    finally:
        server.end()
