"""Serves a model, asks it one question over HTTP and one over gRPC, and shows what comes back.

Run as `python -m jaxserve.entry.demo [MODEL]`. Imports no jax.
"""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc

from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc

DEFAULT_MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France, and what is it known for?"
OTHER_QUESTION = "Name three animals that live in the sea."
MAX_TOKENS = 64
TIMEOUT_S = 120


def start(model: str) -> tuple[subprocess.Popen[str], str, str]:
    """A server's process once it is ready, and its HTTP and gRPC addresses.

    Raises: SystemExit if it ended instead.
    """
    command = [
        *(sys.executable, "-m", "jaxserve", "serve", model),
        *("--port", "0", "--grpc-port", "0", "--log-level", "warning"),
    ]
    print(f"$ jaxserve {' '.join(command[3:])}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    addresses: dict[str, str] = {}
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith(("HTTP ", "gRPC ")):
            name, address = line.split()
            addresses[name] = address.removeprefix("http://")
        if line.strip() == "ready":
            return process, addresses["HTTP"], addresses["gRPC"]
    raise SystemExit(f"the server ended with exit code {process.wait()}")


def ask_http(address: str, question: str) -> Iterator[str]:
    """The answer's pieces, as the server streams them."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise SystemExit(data)
            yield chunk["choices"][0]["delta"].get("content", "")
    connection.close()


def ask_grpc(address: str, question: str) -> Iterator[str]:
    """The answer's pieces, as the server streams them."""
    with grpc.insecure_channel(address) as channel:
        stub = jaxserve_pb2_grpc.InferenceStub(channel)
        request = pb.ChatRequest(
            messages=[pb.Message(role="user", content=question)],
            sampling=pb.SamplingParams(max_tokens=MAX_TOKENS, temperature=0),
        )
        for response in stub.Chat(request, timeout=TIMEOUT_S):
            yield response.text


def show(title: str, question: str, pieces: Iterator[str]) -> None:
    """Prints an answer as it comes, and how fast it came."""
    print(f"\n{title}: {question}", flush=True)
    started_s = time.monotonic()
    first_s = None
    count = 0
    for piece in pieces:
        if piece:
            first_s = first_s or time.monotonic()
            count += 1
            print(piece, end="", flush=True)
    ended_s = time.monotonic()
    if first_s is None:
        raise SystemExit("there was no answer")
    # A piece is a token, but for characters that take several.
    rate = (count - 1) / max(ended_s - first_s, 1e-9)
    print(
        f"\n[first token after {first_s - started_s:.2f} s, then {rate:.1f} tokens/s]", flush=True
    )


def main() -> None:
    process, http_address, grpc_address = start(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL)
    try:
        show("HTTP, streaming", QUESTION, ask_http(http_address, QUESTION))
        show("gRPC", OTHER_QUESTION, ask_grpc(grpc_address, OTHER_QUESTION))
    finally:
        process.terminate()
        assert process.stdout is not None
        print("\n" + process.stdout.read(), end="", flush=True)
        code = process.wait()
    if code != 0:
        raise SystemExit(f"the server ended with exit code {code}")


if __name__ == "__main__":
    main()
