"""Thousands of odd requests of every method of both gRPC services: none is our fault, and the
server goes on.
"""

import asyncio
import collections
import json
import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from proto_fuzz import Fuzzer, call
from server_fakes import serving
from test_chat_tools import REPLY, THINKS, TOOLS, ends

from jaxserve.entry.grpc_server import SERVICES
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc, vllm_engine_pb2_grpc
from jaxserve.entry.proto import vllm_engine_pb2 as vllm

CASES = 3000
SEED = 1
AT_ONCE = 24
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "ABORTED"}

SAMPLING = pb.SamplingParams(
    max_tokens=5, temperature=0.5, top_p=0.9, seed=1, stop=["x"], logprobs=2, n=2,
    logit_bias={5: 1.0}, bad_words_ids=[pb.TokenIds(ids=[1, 2])], prompt_logprobs=1,
)  # fmt: skip
TOOL = pb.Tool(name="get_weather", parameters=json.dumps(TOOLS[0]["function"]["parameters"]))
VLLM_SAMPLING = vllm.SamplingParams(max_tokens=5, top_p=0.9, logprobs=1, n=2, stop=["x"])
TOKENIZED = vllm.TokenizedInput(original_text="a", input_ids=[97, 98])
VALID: tuple[Message, ...] = (
    pb.GenerateRequest(text="abc", sampling=SAMPLING),
    pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6]), model="tiny", request_id="r1"),
    pb.ChatRequest(
        messages=[
            pb.Message(role="user", content="Weather?"),
            pb.Message(
                role="assistant",
                tool_calls=[pb.ToolCall(id="c", name="get_weather", arguments="{}")],
            ),
            pb.Message(role="tool", tool_call_id="c", content="rain"),
        ],
        tools=[TOOL],
        tool_choice=pb.ToolChoice(mode="auto"),
        chat_template_kwargs='{"enable_thinking": true}',
        sampling=SAMPLING,
    ),
    pb.ChatRequest(messages=[pb.Message(role="user", content="Hi")]),
    pb.EmbedRequest(input=[pb.Prompt(text="a"), pb.Prompt(text="b")], pooling="mean"),
    pb.TokenizeRequest(text="a"),
    pb.DetokenizeRequest(token_ids=[97, 257]),
    pb.AbortRequest(request_id="r1"),
    vllm.GenerateRequest(tokenized=TOKENIZED, sampling_params=VLLM_SAMPLING, stream=True),
    vllm.GenerateRequest(text="abc", sampling_params=VLLM_SAMPLING, request_id="r1"),
    vllm.EmbedRequest(tokenized=TOKENIZED),
    vllm.AbortRequest(request_ids=["r1"]),
    vllm.GetLoadsRequest(dp_rank=0, include=["core"]),
)


async def test_no_request_is_our_fault(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    fuzzer = Fuzzer(SEED)
    methods = [method for service in SERVICES for method in service.methods]
    codes: collections.Counter[str] = collections.Counter()
    faults: list[tuple[str, str, str, str]] = []
    async with (
        serving(
            reply=REPLY, template=THINKS, set_up=ends, embeddings=True, max_queue=2000
        ) as served,
        grpc.aio.insecure_channel(served.target) as channel,
    ):
        cases = iter(range(CASES))

        async def client() -> None:
            for i in cases:
                method = methods[i % len(methods)]
                valid = [one for one in VALID if one.DESCRIPTOR is method.input_type]
                data = fuzzer.request(method, valid)
                code, details = await call(channel, method, data)
                codes[code] += 1
                if code not in ALLOWED:
                    faults.append((method.full_name, code, details, data[:2000].hex()))

        async with asyncio.timeout(120):
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        assert not faults
        await served.idle()

        ours: Any = jaxserve_pb2_grpc.InferenceStub(channel)
        theirs: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await theirs.HealthCheck(vllm.HealthCheckRequest())).healthy
        assert (await ours.GetServerInfo(pb.GetServerInfoRequest())).num_in_flight == 0
        whole = [r async for r in ours.Generate(pb.GenerateRequest(text="a"))]
        assert whole[-1].usage.completion_tokens == 16
    assert sum(codes.values()) == CASES
    # Both sides of every check are walked.
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > CASES / 10, codes
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
