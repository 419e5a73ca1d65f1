"""Both gRPC services over a real engine of a tiny model."""

import asyncio
import collections
import io
import json
import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from proto_fuzz import Fuzzer, call

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.client import Client
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc, vllm_engine_pb2_grpc
from jaxserve.entry.proto import vllm_engine_pb2 as vllm
from jaxserve.entry.serve import Server

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "grpc.md"
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 64}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(tiny_folder: pathlib.Path) -> AsyncIterator[grpc.aio.Channel]:
    def make_client(config: EngineConfig, observer: Any, on_progress: Any) -> Client:
        return Client(config, process="thread", observer=observer, on_progress=on_progress)

    config = EngineConfig(model=str(tiny_folder), **LIMITS)
    settings = ServerConfig(port=0, grpc_port=0)
    server = Server(config, settings, make_client=make_client, out=io.StringIO())
    task = asyncio.ensure_future(server.run())
    try:
        async with asyncio.timeout(240):
            await server.ready.wait()
        assert server.addresses is not None
        target = f"127.0.0.1:{server.addresses.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            channel.target = target  # pyright: ignore[reportAttributeAccessIssue]
            yield channel
    finally:
        server.stop()
        await task


async def test_both_services_say_the_same(channel: grpc.aio.Channel):
    ours: Any = jaxserve_pb2_grpc.InferenceStub(channel)
    theirs: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    await ours.FlushCache(pb.FlushCacheRequest())
    prompt = [40 + i for i in range(40)]
    sampling = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 2}
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**sampling)
    )
    own = [response async for response in ours.Generate(request)]
    tokens = [token for response in own for token in response.token_ids]
    logprobs = [p.logprob for response in own for p in response.logprobs]
    other = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        sampling_params=vllm.SamplingParams(**sampling),
    )
    [whole] = [response.complete async for response in theirs.Generate(other)]
    assert list(whole.output_ids) == tokens
    np.testing.assert_allclose(whole.output_logprobs.token_logprobs, logprobs, rtol=1e-3)
    assert (own[-1].usage.cached_tokens, whole.cached_tokens) == (0, 32)

    loads = await ours.GetLoads(pb.GetLoadsRequest())
    assert (loads.num_running, loads.cached_tokens) == (0, 32)
    assert loads.generated_tokens_per_s > 0


async def test_the_documented_client_learns_the_services_from_reflection(
    channel: Any, capsys: pytest.CaptureFixture[str]
):
    [code] = re.findall(r"```python reflection\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert "jaxserve.entry" not in code
    code = code.replace("127.0.0.1:50051", channel.target)
    await asyncio.to_thread(exec, compile(code, str(DOCS), "exec"), {})
    printed = capsys.readouterr().out
    *responses, loads = [
        json.loads(text) for text in re.split(r"(?<=^\})\n", printed, flags=re.MULTILINE) if text
    ]
    assert responses[-1]["finishReason"] == "FINISH_REASON_LENGTH"
    assert responses[-1]["usage"]["completionTokens"] == "8"
    assert sum(len(response["tokenIds"]) for response in responses) == 8
    assert loads["dpRankCount"] == 1


VALID = (
    pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=4, seed=1)),
    pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=4, regex="[a-z]+")),
    pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=4, json_schema="{}")),
    pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=4, grammar='start: "a"')),
    pb.GenerateRequest(
        text="a",
        sampling=pb.SamplingParams(
            max_tokens=4, allowed_token_ids=pb.TokenIds(ids=[7, 8]), no_repeat_ngram_size=1
        ),
    ),
    pb.GenerateRequest(
        text="a", sampling=pb.SamplingParams(max_tokens=4, use_beam_search=True, best_of=2)
    ),
    pb.ChatRequest(
        messages=[pb.Message(role="user", content="a")], sampling=pb.SamplingParams(max_tokens=4)
    ),
    vllm.GenerateRequest(
        text="a", sampling_params=vllm.SamplingParams(max_tokens=4, regex="a+", logprobs=1)
    ),
)


async def test_no_request_is_the_engines_fault(channel: grpc.aio.Channel):
    fuzzer = Fuzzer(3)
    services = (
        pb.DESCRIPTOR.services_by_name["Inference"],
        vllm.DESCRIPTOR.services_by_name["VllmEngine"],
    )
    methods = {
        method.input_type: method
        for service in services
        for method in service.methods
        if method.name in ("Generate", "Chat")
    }
    codes: collections.Counter[str] = collections.Counter()
    cases = iter(range(800))

    async def client() -> None:
        for i in cases:
            valid = VALID[i % len(VALID)]
            method = methods[valid.DESCRIPTOR]
            data = fuzzer.request(method, [valid])
            code, details = await call(channel, method, data)
            codes[code] += 1
            allowed = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")
            assert code in allowed, (code, details, data[:1000].hex())

    async with asyncio.timeout(240):
        await asyncio.gather(*(client() for _ in range(8)))
    ours: Any = jaxserve_pb2_grpc.InferenceStub(channel)
    assert (await ours.GetServerInfo(pb.GetServerInfoRequest())).num_in_flight == 0
    assert codes["OK"] > 100, codes
