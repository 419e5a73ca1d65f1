"""A server under load, over HTTP or gRPC: the trace's requests, streamed.

Run: python -m bench.serve [MODEL] [--requests 500] [--clients 32 | --rate 4] [--transport grpc]
     [--ttft-limit-ms 500] [--tpot-limit-ms 50] [--shrink 8]
Closed loop: each of `--clients` sends its next request when its last is answered. Open loop, with
`--rate`: requests come at random (Poisson) times, that many a second, however many are in flight;
times count from when a request was due. Goodput is requests a second that kept both limits
(DistServe, arXiv:2401.09670). Starts a server of its own on a free port of 127.0.0.1, or uses
`--url` (and `--grpc-target`).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import httpx

from bench import record
from bench.workloads import Request, poisson_arrivals, trace_requests
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc

TIMEOUT_S = 600
WARM_UP_REQUESTS = 4
"""Sent before what is measured; `server_counters` has them too."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request's times in seconds, or what went wrong with it."""

    num_prompt: int
    num_output: int
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Between pieces that came; a piece may hold several tokens."""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.num_output < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1)


Usage = tuple[int, int]
"""Prompt and completion tokens, as the server counts them."""
Transport = Callable[[list[int], int], AsyncIterator[Usage | None]]
"""(prompt, length) -> None for each piece of the answer, and the usage."""


class RefusedError(Exception):
    """What the server answered instead of tokens."""


def http_transport(client: httpx.AsyncClient, model: str) -> Transport:
    async def pieces(prompt: list[int], length: int) -> AsyncIterator[Usage | None]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RefusedError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RefusedError(str(event["error"]))
                if event.get("choices"):
                    yield None
                if usage := event.get("usage"):
                    yield usage["prompt_tokens"], usage["completion_tokens"]

    return pieces


def grpc_transport(channel: grpc.aio.Channel) -> Transport:
    stub = jaxserve_pb2_grpc.InferenceStub(channel)

    async def pieces(prompt: list[int], length: int) -> AsyncIterator[Usage | None]:
        sampling = pb.SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
        async for response in stub.Generate(request, timeout=TIMEOUT_S):
            yield None
            if response.HasField("usage"):
                yield response.usage.prompt_tokens, response.usage.completion_tokens

    return pieces


async def ask(transport: Transport, request: Request, start_s: float) -> Answer:
    """Sends one request; its times count from `start_s` (of time.perf_counter)."""
    prompt, length = request
    times_s: list[float] = []
    usage = None
    try:
        async for piece in transport(prompt, length):
            if piece is None:
                times_s.append(time.perf_counter())
            else:
                usage = piece
    except (httpx.HTTPError, grpc.aio.AioRpcError, RefusedError) as error:
        return Answer(len(prompt), 0, error=repr(error))
    if not times_s or usage != (len(prompt), length):
        return Answer(len(prompt), 0, error=f"asked {len(prompt)} + {length} tokens, got {usage}")
    return Answer(
        len(prompt),
        length,
        ttft_s=times_s[0] - start_s,
        e2e_s=times_s[-1] - start_s,
        gaps_s=tuple(b - a for a, b in itertools.pairwise(times_s)),
    )


async def closed_loop(
    transport: Transport, requests: Sequence[Request], clients: int
) -> list[Answer]:
    """Each client sends its next request when its last is answered."""
    waiting = iter(requests)
    answers: list[Answer] = []

    async def client() -> None:
        for request in waiting:
            answers.append(await ask(transport, request, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(
    transport: Transport, requests: Sequence[Request], arrivals_s: Sequence[float]
) -> list[Answer]:
    """Each request is sent at its time, in seconds from now, whatever became of the others."""
    begin_s = time.perf_counter()

    async def at(request: Request, due_s: float) -> Answer:
        await asyncio.sleep(due_s - time.perf_counter())
        return await ask(transport, request, due_s)

    return await asyncio.gather(
        *(
            at(request, begin_s + arrival_s)
            for request, arrival_s in zip(requests, arrivals_s, strict=True)
        )
    )


def kept_limits(
    answers: Sequence[Answer], ttft_limit_ms: float | None, tpot_limit_ms: float | None
) -> int:
    """How many requests were answered within the limits; None is no limit."""
    return sum(
        answer.error is None
        and (ttft_limit_ms is None or answer.ttft_s * 1e3 <= ttft_limit_ms)
        and (tpot_limit_ms is None or (answer.tpot_s or 0.0) * 1e3 <= tpot_limit_ms)
        for answer in answers
    )


def summary(answers: Sequence[Answer], wall_s: float) -> dict[str, Any]:
    good = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    output_tokens = sum(answer.num_output for answer in good)
    figures: dict[str, Any] = {
        "requests": len(answers),
        "answered": len(good),
        "errors": len(errors),
        "first_errors": errors[:3],
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 1),
        "input_tokens": sum(answer.num_prompt for answer in good),
        "output_tokens": output_tokens,
    }
    for name, seconds in (
        ("time_to_first_token", [answer.ttft_s for answer in good]),
        ("time_per_output_token", [a.tpot_s for a in good if a.tpot_s is not None]),
        ("time_between_tokens", [gap_s for answer in good for gap_s in answer.gaps_s]),
        ("end_to_end", [answer.e2e_s for answer in good]),
    ):
        figures[name] = record.percentiles(seconds) if seconds else {}
    return figures


async def run(arguments: argparse.Namespace, url: str, grpc_target: str | None) -> dict[str, Any]:
    requests = trace_requests(arguments.requests, arguments.shrink, arguments.vocab)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
        )
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        if arguments.transport == "grpc":
            assert grpc_target is not None
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(grpc_target))
            transport = grpc_transport(channel)
        else:
            transport = http_transport(client, model)
        warm_up = trace_requests(WARM_UP_REQUESTS, arguments.shrink, arguments.vocab, seed=1)
        await closed_loop(transport, warm_up, len(warm_up))
        start_s = time.perf_counter()
        if arguments.rate is None:
            answers = await closed_loop(transport, requests, arguments.clients)
        else:
            arrivals_s = poisson_arrivals(len(requests), arguments.rate)
            answers = await open_loop(transport, requests, arrivals_s)
        wall_s = time.perf_counter() - start_s
        metrics = (await client.get("/metrics")).text
    figures = {
        "model": model,
        "transport": arguments.transport,
        "shrink": arguments.shrink,
        "warm_up_requests": WARM_UP_REQUESTS,
        **({"clients": arguments.clients} if arguments.rate is None else {"rate": arguments.rate}),
        **summary(answers, wall_s),
    }
    if arguments.ttft_limit_ms is not None or arguments.tpot_limit_ms is not None:
        num_kept = kept_limits(answers, arguments.ttft_limit_ms, arguments.tpot_limit_ms)
        figures["goodput"] = {
            "ttft_limit_ms": arguments.ttft_limit_ms,
            "tpot_limit_ms": arguments.tpot_limit_ms,
            "kept_share": round(num_kept / len(answers), 4),
            "requests_per_s": round(num_kept / wall_s, 3),
        }
    figures["server_counters"] = {
        name: float(value)
        for name, value in re.findall(r"^(jaxserve_\w+_total\S*) (\S+)$", metrics, re.M)
    }
    return figures


@dataclasses.dataclass
class Server:
    """A `jaxserve serve` process that is ready."""

    process: subprocess.Popen[str]
    reader: threading.Thread
    """Of what it prints from then on."""
    url: str
    grpc_target: str
    device: str
    ready_s: float
    """From the command to ready."""

    @classmethod
    def start(cls, model: str, flags: Sequence[str]) -> "Server":
        """Starts one on free ports and waits until it's ready."""
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxserve", "serve", model),
                *("--port=0", "--grpc-port=0", "--log-level=warning"),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        told = ""
        for line in process.stdout:
            print("server:", line.rstrip(), file=sys.stderr)
            told += line
            if line.strip() == "ready":
                break
        else:
            raise SystemExit(f"the server ended with code {process.wait()} before it was ready")
        # a pipe that nobody reads would fill up and stop the server
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        found = [
            re.search(pattern, told, re.M)
            for pattern in (r"^HTTP +(\S+)$", r"^gRPC +(\S+)$", r"\) on ([^,\n]+)")
        ]
        url, grpc_target, device = (match.group(1) if match else "" for match in found)
        device = record.cpu_name() if device == "cpu" else device
        return cls(process, reader, url, grpc_target, device, time.perf_counter() - start_s)

    def stop(self) -> int:
        """Returns its exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests a second, instead of clients")
    parser.add_argument("--transport", choices=("http", "grpc"), default="http")
    parser.add_argument("--ttft-limit-ms", type=float)
    parser.add_argument("--tpot-limit-ms", type=float)
    parser.add_argument("--shrink", type=int, default=8, help="divides the trace's lengths")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--grpc-target", help="host:port of the same server")
    parser.add_argument("--device", help="what that server runs on; default: this processor")
    parser.add_argument("--serve-flags", default="", help="for the server that is started")
    arguments = parser.parse_args()
    if arguments.url is None:
        if arguments.grpc_target or arguments.device:
            parser.error("--grpc-target and --device are for a server at --url")
        server = Server.start(arguments.model, arguments.serve_flags.split())
        device = server.device
        try:
            figures = asyncio.run(run(arguments, server.url, server.grpc_target))
        finally:
            code = server.stop()
        figures |= {"ready_s": round(server.ready_s, 2), "server_exit_code": code}
    else:
        if arguments.transport == "grpc" and arguments.grpc_target is None:
            parser.error("--transport grpc needs --grpc-target beside --url")
        if arguments.serve_flags:
            parser.error("--serve-flags are for a server that is started, not for --url")
        figures = asyncio.run(run(arguments, arguments.url, arguments.grpc_target))
        device = arguments.device or record.cpu_name()
    record.store("serve", device, figures)
    if figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
