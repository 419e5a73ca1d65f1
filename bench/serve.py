"""A server under load: concurrent HTTP clients send the trace's requests, each its next when its
last is answered.

Run: python -m bench.serve [MODEL] [--requests 500] [--clients 32] [--shrink 8]
Starts a server of its own on a free port of 127.0.0.1, or uses --url. `--shrink` divides the
trace's lengths.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from bench import record, trace


async def one(
    client: httpx.AsyncClient, model: str, prompt: list[int], length: int
) -> dict[str, Any]:
    """Streams one completion. Returns its times in seconds, or `error`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = last = time.perf_counter()
    first: float | None = None
    gaps: list[float] = []
    usage = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return {"error": f"{response.status_code} {(await response.aread())[:200]!r}"}
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return {"error": str(event["error"])}
                usage = event.get("usage") or usage
                now = time.perf_counter()
                if first is None:
                    first = now - start
                elif event.get("choices"):
                    gaps.append(now - last)
                last = now
    except httpx.HTTPError as error:
        return {"error": repr(error)}
    if usage is None or first is None:
        return {"error": "no usage in the stream"}
    if usage["completion_tokens"] != length or usage["prompt_tokens"] != len(prompt):
        return {"error": f"asked {len(prompt)} + {length} tokens, got {usage}"}
    return {"ttft": first, "gaps": gaps, "e2e": last - start, "out": length, "in": len(prompt)}


async def run(url: str, requests: list[tuple[list[int], int]], clients: int) -> dict[str, Any]:
    queue = list(reversed(requests))
    results: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def worker() -> None:
            while queue:
                prompt, length = queue.pop()
                results.append(await one(client, model, prompt, length))

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(clients)))
        wall_s = time.perf_counter() - start
        metrics = (await client.get("/metrics")).text
    good = [r for r in results if "error" not in r]
    errors = [r["error"] for r in results if "error" in r]
    out_tokens = sum(r["out"] for r in good)
    return {
        "model": model,
        "requests": len(requests),
        "answered": len(good),
        "errors": len(errors),
        "first_errors": errors[:3],
        "clients": clients,
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(out_tokens / wall_s, 1),
        "input_tokens": sum(r["in"] for r in good),
        "output_tokens": out_tokens,
        "time_to_first_token": record.percentiles([r["ttft"] for r in good]) if good else {},
        "time_between_tokens": record.percentiles([g for r in good for g in r["gaps"]] or [0.0]),
        "end_to_end": record.percentiles([r["e2e"] for r in good]) if good else {},
        "server_counters": {
            name: float(value)
            for name, value in re.findall(r"^(jaxserve_\w+_total\S*) (\S+)$", metrics, re.M)
        },
    }


def start_server(model: str, flags: list[str]) -> tuple[subprocess.Popen[str], str, float]:
    """Starts `jaxserve serve` on a free port and waits until it's ready: process, URL, seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxserve", "serve", model),
            *("--port", "0", "--log-level", "warning"),
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        print("server:", line.rstrip(), file=sys.stderr)
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            url = match.group()
        if line.strip() == "ready":
            # a pipe that nobody reads would fill up and stop the server
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, url, time.perf_counter() - start
    raise SystemExit(f"the server ended with code {process.wait()} before it was ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--url")
    parser.add_argument("--serve-flags", default="", help="for the server that is started")
    arguments = parser.parse_args()
    requests = [
        (prompt[: max(1, len(prompt) // arguments.shrink)], max(1, length // arguments.shrink))
        for prompt, length in trace.make_trace(arguments.requests, 0, arguments.vocab)
    ]
    process, ready_s = None, None
    url = arguments.url
    if url is None:
        process, url, ready_s = start_server(arguments.model, arguments.serve_flags.split())
    try:
        figures = asyncio.run(run(url, requests, arguments.clients))
    finally:
        code = None
        if process is not None:
            process.terminate()
            code = process.wait(60)
    figures |= {"shrink": arguments.shrink, "ready_s": ready_s, "server_exit_code": code}
    record.store("serve", record.cpu_name(), figures)
    if figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
