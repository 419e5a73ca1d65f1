"""The gRPC server over a fake engine, on a loopback port."""

import asyncio
import json
import logging
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_fakes import REPLY, FakeEngine, Served, finish, serving, serving_grpc

import jaxserve
from jaxserve.entry.front import Front
from jaxserve.entry.grpc_io import STRUCTURES
from jaxserve.entry.proto import generate, jaxserve_pb2_grpc, vllm_engine_pb2
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.rate import RateMeter
from jaxserve.types import SamplingParams

METHOD = "/jaxserve.v1.Inference/Generate"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(max_body_bytes=100_000) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Served, Any]]:
    """One server for all the requests that reach no engine."""
    async with serving_grpc() as served_and_stub:
        yield served_and_stub


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return jaxserve_pb2_grpc.InferenceStub(channel)


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(r.text for r in responses if r.index == index)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish(call)
    return caught.value


def test_generated_files_are_current(tmp_path: pathlib.Path):
    generate.run(f"--descriptor_set_out={tmp_path / 'set'}")
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file:
        pool.Add(file)  # pyright: ignore
    for descriptor in (pb.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR):
        current, generated = (descriptor_pb2.FileDescriptorProto() for _ in range(2))
        pool.FindFileByName(descriptor.name).CopyToProto(current)
        descriptor.CopyToProto(generated)
        for file in (current, generated):
            for message in (m for top in file.message_type for m in (top, *top.nested_type)):
                for field in message.field:
                    field.ClearField("json_name")  # kept by one of the two only
        assert current == generated, "run `make proto`"


def test_sampling_has_the_python_parameters_under_their_names():
    structures = set(STRUCTURES)
    fields = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert structures < fields
    python = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields - structures - {"bad_words_ids"} == python - {"grammar"}
    for request in (pb.GenerateRequest, pb.ChatRequest):
        options = {"priority", "cache_salt", "request_id"}  # of Client.open
        assert options < {field.name for field in request.DESCRIPTOR.fields}


async def test_generate_streams(stub, served: Served):
    served.engine.cached = 1
    request = pb.GenerateRequest(text="ab")
    responses = [r async for r in stub.Generate(request)]
    assert text_of(responses) == (REPLY * 2).encode()[:16].decode()  # 16, as over HTTP
    assert [r.finish_reason for r in responses[:-1]] == [0] * (len(responses) - 1)
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert not responses[0].HasField("usage")
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 16, 1)
    assert len({r.request_id for r in responses}) == 1


async def test_generate_from_tokens_with_choices_stop_and_logprobs(stub):
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(n=2, stop=["wör"], logprobs=2),
        request_id="mine",
    )
    responses = [r async for r in stub.Generate(request)]
    assert {r.request_id for r in responses} == {"mine"}
    for index in range(2):
        assert text_of(responses, index) == "Hello, "
        last = [r for r in responses if r.index == index][-1]
        assert last.finish_reason == pb.FINISH_REASON_STOP
        assert last.WhichOneof("stopped_at") == "stop_string"
        assert last.stop_string == "wör"
    assert responses[0].logprobs[0].token == "H"
    assert len(responses[0].logprobs[0].top) == 2
    assert sum(r.HasField("usage") for r in responses) == 1


async def test_token_options_reach_the_engine(stub, served: Served):
    sampling = pb.SamplingParams(
        typical_p=0.4, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5,
        no_repeat_ngram_size=3, logit_bias={7: -1.0}, bad_words=["a"],
        allowed_token_ids=pb.TokenIds(ids=[5, 9]), bad_words_ids=[pb.TokenIds(ids=[3, 4])],
        prompt_logprobs=1, token_ids_logprob=[9, 4], logprobs_mode="processed_logprobs",
        prompt_logprobs_start=1,
    )  # fmt: skip
    responses = [r async for r in stub.Generate(pb.GenerateRequest(text="abc", sampling=sampling))]
    given = served.engine.requests[-1].sampling
    floats = (given.typical_p, given.repetition_penalty, given.presence_penalty)
    assert (*floats, given.frequency_penalty) == (0.4, 1.2, 0.5, -0.5)
    assert (given.no_repeat_ngram_size, given.logit_bias) == (3, {7: -1.0})
    assert (given.allowed_token_ids, given.bad_words[-1]) == ((5, 9), (3, 4))
    assert given.logprobs_mode == "processed_logprobs"
    prompt = responses[0].prompt_logprobs
    assert [(p.token, p.logprob, p.top[0].token_id) for p in prompt] == [("c", -0.25, 0)]
    assert not any(r.prompt_logprobs for r in responses[1:])
    named = responses[0].logprobs[0].named
    assert [(top.token_id, top.logprob) for top in named] == [(9, -3.0), (4, -4.0)]
    unset = [r async for r in stub.Generate(pb.GenerateRequest(text="abc"))]
    assert served.engine.requests[-1].sampling.allowed_token_ids is None
    assert not unset[0].prompt_logprobs


async def test_chat_uses_the_template_and_the_whole_context(stub, served: Served):
    served.engine.ends = True
    messages = [pb.Message(role="system", content="s"), pb.Message(role="user", content="u")]
    responses = [r async for r in stub.Chat(pb.ChatRequest(messages=messages))]
    assert text_of(responses) == REPLY
    request = served.engine.requests[-1]
    assert len(request.token_ids) == len("<system>s\n<user>u\n<assistant>")
    assert request.sampling.max_tokens == 256 - len(request.token_ids)


async def test_unset_is_not_zero(stub, served: Served):
    for sampling in (pb.SamplingParams(), pb.SamplingParams(temperature=0)):
        async for _ in stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)):
            pass
    assert [r.sampling.temperature for r in served.engine.requests] == [1.0, 0.0]
    error = await refused(
        stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=0)))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
        (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt"),
        (pb.GenerateRequest(text="a", model="other"), "NOT_FOUND", "other"),
        (pb.GenerateRequest(text="a", request_id=""), "INVALID_ARGUMENT", "request_id"),
        (pb.GenerateRequest(text="a", request_id="x" * 200), "INVALID_ARGUMENT", "request_id"),
        (pb.GenerateRequest(text="a", request_id="x\ny"), "INVALID_ARGUMENT", "request_id"),
        (pb.GenerateRequest(text="a" * 300), "INVALID_ARGUMENT", "300"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[258])), "INVALID_ARGUMENT", "258"),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "temperature",
        ),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(n=-1)),
            "INVALID_ARGUMENT",
            "n: ",
        ),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=["x"] * 1000)),
            "INVALID_ARGUMENT",
            "stop",
        ),
    ],
    ids=range(11),
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_requests(shared, request_: Any, code: str, words: str):
    served, stub = shared
    error = await refused(stub.Generate(request_))
    assert error.code().name == code
    assert words in (error.details() or "")
    assert served.engine.requests == []


LARGE = {
    # field: (what it is, what is said)
    "top_k": (2**62, "allowed: -1 to 2147483647"),
    "min_tokens": (2**62, "allowed: 0 to 2147483647"),
    "max_tokens": (2**62, "allowed beside the prompt's 1 tokens: up to 255;"),
    "no_repeat_ngram_size": (2**62, "allowed: 0 to 2147483647"),
    "truncate_prompt_tokens": (2**62, "allowed: -1, or 1 to 2147483647"),
    "stream_interval": (2**62, "allowed: 1 to 2147483647"),
    "prompt_logprobs_start": (2**62, "allowed: 0 to 2147483647"),
    "n": (2**31 - 1, "allowed: 1 to 128"),
    "best_of": (2**31 - 1, "allowed: n (1) to 128"),
    "logprobs": (2**31 - 1, "allowed: 0 to 20, or -1 for all"),
    "prompt_logprobs": (2**31 - 1, "allowed: 0 to 20, or -1 for all"),
}


async def test_the_limit_of_a_number_over_it_is_told(stub):
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if field.is_repeated or field.name == "seed":  # any 64-bit integer is one
            continue
        if field.cpp_type not in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
            continue
        value, words = LARGE[field.name]
        sampling = pb.SamplingParams(**{field.name: value})
        error = await refused(stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith(f"{field.name}: is {value}; {words}")


async def test_bad_chats(stub):
    for messages in ([], [pb.Message(role="robot", content="a")]):
        error = await refused(stub.Chat(pb.ChatRequest(messages=messages)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "messages" in (error.details() or "")


async def test_bytes_that_are_no_request_are_the_callers_fault(channel: grpc.aio.Channel):
    call = channel.unary_stream(METHOD, request_serializer=bytes, response_deserializer=bytes)
    unknown_field = pb.GenerateRequest(text="a").SerializeToString() + b"\xf8\x06\x01"
    for data in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe", unknown_field, b"\x1a\x03\xf8\x06\x01"):
        error = await refused(call(data))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, data


async def test_large_messages_are_refused(stub):
    error = await refused(stub.Tokenize(pb.TokenizeRequest(text="a" * 200_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_cancel_and_deadline_free_the_request(stub, served: Served):
    served.engine.step_s = 0.01
    long = pb.SamplingParams(max_tokens=200)
    call = stub.Generate(pb.GenerateRequest(text="a", sampling=long))
    await call.read()
    call.cancel()
    await served.idle()
    call = stub.Generate(pb.GenerateRequest(text="a", sampling=long), timeout=0.1)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.idle()
    assert len(served.engine.aborted) == 2


async def test_abort_by_id(stub, served: Served):
    served.engine.step_s = 0.01
    sampling = pb.SamplingParams(max_tokens=200, n=2)
    call = stub.Generate(pb.GenerateRequest(text="a", sampling=sampling, request_id="r1"))
    await call.read()
    again = await refused(stub.Generate(pb.GenerateRequest(text="a", request_id="r1")))
    assert again.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await stub.Abort(pb.AbortRequest(request_id="r1"))).aborted
    error = await refused(call)
    assert error.code() is grpc.StatusCode.ABORTED
    await served.idle()
    assert not (await stub.Abort(pb.AbortRequest(request_id="r1"))).aborted


def slow(engine: FakeEngine) -> None:
    engine.step_s = 0.05


async def test_full_queue():
    async with serving_grpc(max_queue=0, set_up=slow) as (_, stub):
        calls = [stub.Generate(pb.GenerateRequest(text="a")) for _ in range(4)]
        for call in calls:
            await call.read()
        error = await refused(stub.Generate(pb.GenerateRequest(text="a")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers: Any = error.trailing_metadata()
        assert dict(trailers)["retry-after"] == "1"
        for call in calls:
            call.cancel()


async def test_dead_engine_is_unavailable(caplog: pytest.LogCaptureFixture):
    async with serving_grpc(set_up=slow) as (served, stub):
        sampling = pb.SamplingParams(max_tokens=200)
        call = stub.Generate(pb.GenerateRequest(text="a", sampling=sampling))
        await call.read()
        served.engine.die()
        assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
        error = await refused(stub.Tokenize(pb.TokenizeRequest(text="a")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_fault_of_ours_is_internal_and_says_nothing(stub, monkeypatch, caplog):
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(Front, "check_model", fail)
    for call in (
        stub.Generate(pb.GenerateRequest(text="a")),
        stub.Tokenize(pb.TokenizeRequest(text="a")),
    ):
        error = await refused(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "inside" not in (error.details() or "")
    assert caplog.text.count("ZeroDivisionError: inside") == 2


async def test_model_info_and_tokens(stub):
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.max_model_len, info.mesh["tensor"]) == ("tiny", 256, 1)
    ids = (await stub.Tokenize(pb.TokenizeRequest(text="wörld"))).token_ids
    assert len(ids) == 6
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "wörld"
    error = await refused(stub.Detokenize(pb.DetokenizeRequest(token_ids=[4000])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_special_tokens_are_shown_when_asked_for(stub):
    special = pb.DetokenizeRequest(token_ids=[ord("H"), 257], skip_special_tokens=False)
    plain = pb.DetokenizeRequest(token_ids=[ord("H"), 257])
    shown, hidden = [(await stub.Detokenize(one)).text for one in (special, plain)]
    assert (len(hidden), shown) == (1, f"{hidden}</s>")
    special = pb.TokenizeRequest(text="a", add_special_tokens=False)
    assert len((await stub.Tokenize(special)).token_ids) == 1


async def test_embeddings():
    async with serving_grpc(embeddings=True) as (served, stub):
        texts = pb.EmbedRequest(input=[pb.Prompt(text="abc"), pb.Prompt(text="d")], user="u")
        answer = await stub.Embed(texts)
        assert [list(one.values) for one in answer.embeddings] == [[1.0, 0.0]] * 2
        assert (answer.usage.prompt_tokens, answer.request_id[:5]) == (4, "embd-")
        tokens = [pb.Prompt(tokens=pb.TokenIds(ids=[5, 6, 7]))]
        answer = await stub.Embed(pb.EmbedRequest(input=tokens, pooling="mean", dimensions=2))
        assert list(answer.embeddings[0].values) == pytest.approx([0.6, 0.8])
        raw = pb.EmbedRequest(input=tokens, normalize=False, truncate_prompt_tokens=2)
        assert list((await stub.Embed(raw)).embeddings[0].values) == [2.0, 0.0]
        mixed = [pb.Prompt(text="a"), *tokens]
        for fields, words in (
            ({"input": []}, "input"), ({"input": mixed}, "input"),
            ({"input": [pb.Prompt()]}, "input[0]"),
            ({"pooling": "max"}, "pooling"), ({"dimensions": 3}, "dimensions"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"request_id": "a b"}, "request_id"),
        ):  # fmt: skip
            error = await refused(stub.Embed(pb.EmbedRequest(**{"input": tokens, **fields})))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (error.details() or "").startswith(words)
        await served.idle()
        other = await refused(stub.Embed(pb.EmbedRequest(input=tokens, model="other")))
        assert other.code() is grpc.StatusCode.NOT_FOUND


async def test_without_the_engines_support_embeddings_are_refused(stub):
    error = await refused(stub.Embed(pb.EmbedRequest(input=[pb.Prompt(text="a")])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_server_info_loads_and_flush(stub, served: Served):
    served.engine.cached = 1
    async for _ in stub.Generate(pb.GenerateRequest(text="abcd")):
        pass
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.model, info.version, info.max_in_flight) == ("tiny", jaxserve.__version__, 12)
    assert (info.num_in_flight, info.num_compiled) == (0, 2)
    assert json.loads(info.config)["max_queue"] == 8
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert (loads.num_running, loads.pages_total) == (0, 64)
    assert (loads.prompt_tokens, loads.cached_tokens, loads.generated_tokens) == (4, 1, 16)
    assert served.engine.num_flushes == 0
    await stub.FlushCache(pb.FlushCacheRequest())
    assert served.engine.num_flushes == 1


async def test_salt_priority_and_user_go_where_they_should(stub, served: Served, caplog):
    caplog.set_level(logging.INFO, "jaxserve.access")
    request = pb.GenerateRequest(text="a", cache_salt="mine", user="somebody")
    async for _ in stub.Generate(request):
        pass
    assert served.engine.requests[-1].cache_salt == "mine"
    assert "user='somebody'" in caplog.text
    error = await refused(stub.Generate(pb.GenerateRequest(text="a", priority=1)))
    assert "policy" in (error.details() or "")


async def test_abort_all(stub, served: Served):
    served.engine.step_s = 0.01
    sampling = pb.SamplingParams(max_tokens=200)
    calls = [stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)) for _ in range(3)]
    for call in calls:
        await call.read()
    assert (await stub.Abort(pb.AbortRequest(abort_all=True))).aborted
    for call in calls:
        assert (await refused(call)).code() is grpc.StatusCode.ABORTED
    assert not (await stub.Abort(pb.AbortRequest(abort_all=True))).aborted
    for bad in (pb.AbortRequest(), pb.AbortRequest(request_id="a", abort_all=True)):
        error = await refused(stub.Abort(bad))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_rate_is_of_the_last_seconds():
    meter = RateMeter()
    assert meter.rate(5.0, 7) == 0
    for second in range(100):
        meter.see(float(second), 10 * second)
    assert meter.rate(100.0, 1000) == 10
    assert meter.rate(105.0, 1000) == pytest.approx(50 / 10)  # since 95 s
    assert meter.rate(200.0, 1000) == 0


async def test_health_and_reflection(channel: grpc.aio.Channel):
    health: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", "jaxserve.v1.Inference", "vllm.grpc.engine.VllmEngine"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    missing = await refused(health.Check(health_pb2.HealthCheckRequest(service="x")))
    assert missing.code() is grpc.StatusCode.NOT_FOUND

    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxserve.v1.Inference"),
    ]
    services, file = [r async for r in reflection.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in services.list_services_response.service}
    assert {"jaxserve.v1.Inference", "grpc.health.v1.Health"} <= names
    described = descriptor_pb2.FileDescriptorProto.FromString(
        file.file_descriptor_response.file_descriptor_proto[0]
    )
    assert "Generate" in {method.name for method in described.service[0].method}


async def test_many_at_once():
    async with serving_grpc(max_queue=100) as (_, stub):

        async def one() -> str:
            return text_of([r async for r in stub.Generate(pb.GenerateRequest(text="a"))])

        texts = await asyncio.gather(*(one() for _ in range(50)))
        assert len(set(texts)) == 1
