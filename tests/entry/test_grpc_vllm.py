"""vLLM's gRPC service over a fake engine, asked as a gateway asks it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from server_fakes import REPLY, Served, byte_tokenizer, finish, serving

from jaxserve.entry.proto import vllm_engine_pb2 as pb
from jaxserve.entry.proto import vllm_engine_pb2_grpc
from jaxserve.types import SamplingParams

TOKENS = pb.TokenizedInput(original_text="abc", input_ids=[97, 98, 99])
IDS = byte_tokenizer().encode(REPLY, False)

LAYOUT: dict[str, dict[int, str]] = {
    "SamplingParams": {
        1: "temperature", 2: "top_p", 3: "top_k", 4: "min_p", 5: "frequency_penalty",
        6: "presence_penalty", 7: "repetition_penalty", 8: "max_tokens", 9: "min_tokens",
        10: "stop", 11: "stop_token_ids", 12: "skip_special_tokens",
        13: "spaces_between_special_tokens", 14: "ignore_eos", 15: "n", 16: "json_schema",
        17: "regex", 18: "grammar", 19: "structural_tag", 20: "json_object", 21: "choice",
        22: "logprobs", 23: "prompt_logprobs", 24: "seed", 25: "include_stop_str_in_output",
        26: "logit_bias", 27: "truncate_prompt_tokens",
    },
    "ChoiceConstraint": {1: "choices"},
    "TokenizedInput": {1: "original_text", 2: "input_ids"},
    "GenerateRequest": {
        1: "request_id", 2: "tokenized", 3: "text", 4: "sampling_params", 5: "stream",
        6: "kv_transfer_params", 7: "mm_inputs", 8: "kv_transfer_params_json",
        9: "data_parallel_rank",
    },
    "KvTransferParams": {1: "remote_host", 2: "remote_port"},
    "OutputLogProbs": {1: "token_logprobs", 2: "token_ids", 3: "top_logprobs"},
    "InputLogProbs": {1: "token_logprobs", 2: "token_ids", 3: "top_logprobs"},
    "InputTokenLogProb": {1: "value"},
    "TopLogProbs": {1: "values", 2: "token_ids"},
    "GenerateResponse": {1: "chunk", 2: "complete"},
    "GenerateStreamChunk": {
        1: "token_ids", 2: "prompt_tokens", 3: "completion_tokens", 4: "cached_tokens",
        5: "output_logprobs", 6: "input_logprobs", 7: "index",
    },
    "GenerateComplete": {
        1: "output_ids", 2: "finish_reason", 3: "prompt_tokens", 4: "completion_tokens",
        5: "cached_tokens", 6: "output_logprobs", 7: "input_logprobs", 8: "index",
        9: "kv_transfer_params", 10: "matched_token_id", 11: "matched_stop_str",
        12: "kv_transfer_params_json",
    },
    "EmbedRequest": {1: "request_id", 2: "tokenized"},
    "EmbedResponse": {1: "embedding", 2: "prompt_tokens", 3: "embedding_dim"},
    "HealthCheckResponse": {1: "healthy", 2: "message"},
    "AbortRequest": {1: "request_ids"},
    "GetModelInfoResponse": {
        1: "model_path", 2: "is_generation", 3: "max_context_length", 4: "vocab_size",
        5: "supports_vision", 6: "served_model_name", 7: "tokenizer_path", 8: "model_type",
        9: "architectures", 10: "eos_token_ids", 11: "pad_token_id", 12: "bos_token_id",
        13: "max_req_input_len", 14: "default_sampling_params_json",
    },
    "GetServerInfoResponse": {
        1: "active_requests", 2: "is_paused", 3: "last_receive_timestamp", 4: "uptime_seconds",
        5: "server_type", 6: "kv_connector", 7: "kv_role", 8: "kv_engine_id",
        9: "data_parallel_size", 10: "shm_namespace_id", 11: "supports_rdma_pull",
    },
    "GetLoadsRequest": {1: "dp_rank", 2: "include"},
    "GetLoadsResponse": {1: "timestamp", 2: "version", 3: "dp_rank_count", 4: "loads"},
    "SchedulerLoad": {
        1: "dp_rank", 2: "num_running_reqs", 3: "num_waiting_reqs", 4: "num_total_reqs",
        5: "num_used_tokens", 6: "max_total_num_tokens", 7: "token_usage", 8: "gen_throughput",
        9: "cache_hit_rate", 10: "utilization", 11: "max_running_requests",
    },
}  # fmt: skip
"""The public one, written down a second time."""


def test_names_and_numbers_are_those_of_the_public_layout():
    file = pb.DESCRIPTOR
    assert (file.package, list(file.services_by_name)) == ("vllm.grpc.engine", ["VllmEngine"])
    for name, message in file.message_types_by_name.items():
        found = {field.number: field.name for field in message.fields}
        assert found == LAYOUT.get(name, {}), name
    # A gateway that was built for the layout reads these bytes.
    request = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 300]))
    request.sampling_params.temperature = 0.5
    assert request.SerializeToString().hex() == "0a01721205120301ac0222050d0000003f"


@contextlib.asynccontextmanager
async def vllm_stub(served: Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(served.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[Any]:
    async with vllm_stub(served) as stub:
        yield stub


async def ask(stub: Any, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**{"tokenized": TOKENS, **fields})
    return [response async for response in stub.Generate(request)]


def params(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"max_tokens": 6, **fields})


async def test_streamed_chunks_make_the_whole(stub, served: Served):
    served.engine.cached = 1
    sampling = params(n=2, logprobs=2, prompt_logprobs=1)
    responses = await ask(stub, sampling_params=sampling, stream=True, request_id="mine")
    assert served.engine.requests[0].request_id == "mine #0"
    for index in range(2):
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
        assert [i for chunk in chunks for i in chunk.token_ids] == IDS[:6]
        assert [len(c.token_ids) for c in chunks] == [c.completion_tokens for c in chunks]
        assert {(c.prompt_tokens, c.cached_tokens) for c in chunks} == {(3, 1)}
        assert [i for c in chunks for i in c.output_logprobs.token_ids] == IDS[:6]
        assert {p for c in chunks for p in c.output_logprobs.token_logprobs} == {-0.5}
        assert [len(top.values) for top in chunks[0].output_logprobs.top_logprobs] == [2]
        [complete] = [
            r.complete for r in responses if r.HasField("complete") and r.complete.index == index
        ]
        assert (complete.finish_reason, complete.completion_tokens) == ("length", 6)
        assert list(complete.output_ids) == IDS[:6]
        assert (complete.prompt_tokens, complete.cached_tokens) == (3, 1)
        assert not complete.HasField("output_logprobs")
    first, *others = [r.chunk for r in responses if r.HasField("chunk")]
    scores = first.input_logprobs
    assert [score.HasField("value") for score in scores.token_logprobs] == [False, True, True]
    assert scores.token_logprobs[1].value == -0.25
    assert list(scores.token_ids) == [97, 98, 99]
    assert [len(top.values) for top in scores.top_logprobs] == [0, 1, 1]
    assert not any(chunk.HasField("input_logprobs") for chunk in others)


async def test_whole_answers_are_one_response_a_choice(stub):
    sampling = params(n=2, logprobs=0, prompt_logprobs=0)
    responses = await ask(stub, sampling_params=sampling)
    assert [r.WhichOneof("response") for r in responses] == ["complete"] * 2
    assert sorted(r.complete.index for r in responses) == [0, 1]
    for complete in (r.complete for r in responses):
        assert list(complete.output_logprobs.token_ids) == IDS[:6] == list(complete.output_ids)
        assert not complete.output_logprobs.top_logprobs
        assert list(complete.input_logprobs.token_ids) == [97, 98, 99]


async def test_stops(stub):
    [response] = await ask(stub, sampling_params=params(max_tokens=20, stop=["wör"]))
    assert response.complete.finish_reason == "stop"
    assert response.complete.matched_stop_str == "wör"
    assert byte_tokenizer().decode(response.complete.output_ids) == "Hello, wör"
    [response] = await ask(stub, sampling_params=params(stop_token_ids=[IDS[2]]))
    assert response.complete.matched_token_id == IDS[2]
    assert list(response.complete.output_ids) == IDS[:3]


async def test_what_is_asked_for_reaches_the_engine(stub, served: Served):
    sampling = params(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.1, min_tokens=2, ignore_eos=True,
        logit_bias={7: -1.5}, seed=-3, truncate_prompt_tokens=2, regex="[a-z]+",
    )  # fmt: skip
    await ask(stub, sampling_params=sampling)
    request = served.engine.requests[-1]
    given = request.sampling
    assert list(request.token_ids) == [98, 99]
    # As the decimals that were meant, not as their float32 neighbours.
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.7, 0.9, 5, 0.01)
    penalties = (given.frequency_penalty, given.presence_penalty, given.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.1)
    assert (given.min_tokens, given.stop_token_ids, given.logit_bias) == (2, (), {7: -1.5})
    assert (given.seed, given.grammar.kind, given.grammar.text) == (-3, "regex", "[a-z]+")

    await ask(stub, text="abcd", sampling_params=pb.SamplingParams(json_object=False))
    request = served.engine.requests[-1]
    given = request.sampling
    assert len(request.token_ids) == 4
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (1, 1, 0, 0)
    assert (given.repetition_penalty, given.grammar) == (1, None)
    assert given.max_tokens == 252  # until the context is full


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"kv_transfer_params": pb.KvTransferParams()}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"tokenized": None}, "input"),
        ({"tokenized": pb.TokenizedInput(original_text="a")}, "tokenized.input_ids"),
        ({"tokenized": pb.TokenizedInput(input_ids=[258])}, "tokenized.input_ids"),
        ({"tokenized": None, "text": ""}, "text"),
        ({"request_id": "a b"}, "request_id"),
        ({"sampling_params": params(temperature=3)}, "temperature"),
        ({"sampling_params": params(max_tokens=0)}, "max_tokens"),
        ({"sampling_params": params(max_tokens=1000)}, "max_tokens"),
        ({"sampling_params": params(top_p=float("nan"))}, "top_p"),
        ({"sampling_params": params(logprobs=21)}, "logprobs"),
        ({"sampling_params": params(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"sampling_params": params(json_schema="[")}, "json_schema"),
        ({"sampling_params": params(choice=pb.ChoiceConstraint())}, "choice"),
        ({"sampling_params": params(truncate_prompt_tokens=0)}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(stub, served: Served, fields: Any, words: str):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stub, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{words}: ")
    assert served.engine.requests == []


async def test_the_only_rank_may_be_named(stub):
    [response] = await ask(stub, data_parallel_rank=0, sampling_params=params())
    assert response.complete.completion_tokens == 6
    loads = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=0, include=["core"]))
    assert (loads.dp_rank_count, len(loads.loads)) == (1, 1)
    for bad, words in (({"dp_rank": 1}, "dp_rank"), ({"include": ["lora"]}, "include")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoads(pb.GetLoadsRequest(**bad))
        assert (caught.value.details() or "").startswith(words)


async def test_aborted_requests_are_told_so(stub, served: Served):
    served.engine.step_s = 0.01
    sampling = params(max_tokens=200)
    request = pb.GenerateRequest(
        tokenized=TOKENS, sampling_params=sampling, stream=True, request_id="r1"
    )
    call = stub.Generate(request)
    responses = [await call.read()]
    await stub.Abort(pb.AbortRequest(request_ids=["other", "r1"]))
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert responses[-1].complete.finish_reason == "abort"
    assert len(responses[-1].complete.output_ids) < 200
    await served.idle()
    assert served.engine.aborted == ["r1"]


async def test_a_call_that_is_dropped_frees_the_request(stub, served: Served):
    served.engine.step_s = 0.01
    request = pb.GenerateRequest(tokenized=TOKENS, sampling_params=params(max_tokens=200))
    call = stub.Generate(request)
    while not served.engine.running:
        await asyncio.sleep(0.005)
    call.cancel()
    await served.idle()
    assert len(served.engine.aborted) == 1


async def test_embeddings():
    async with serving(embeddings=True) as served, vllm_stub(served) as stub:
        answer = await stub.Embed(pb.EmbedRequest(tokenized=TOKENS))
        assert list(answer.embedding) == [1.0, 0.0]
        assert (answer.prompt_tokens, answer.embedding_dim) == (3, 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(pb.EmbedRequest())
        assert (caught.value.details() or "").startswith("tokenized.input_ids")


async def test_what_is_served(stub, served: Served):
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.served_model_name, model.model_type) == (
        "tiny",
        "tiny",
        "llama",
    )
    assert (model.vocab_size, model.max_context_length, model.max_req_input_len) == (258, 256, 255)
    assert (model.is_generation, model.supports_vision) == (True, False)
    assert (list(model.eos_token_ids), model.bos_token_id) == ([257], 256)
    assert model.default_sampling_params_json == ""
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("jaxserve", 1)
    assert (server.active_requests, server.last_receive_timestamp) == (0, 0)
    served.engine.cached = 1
    await ask(stub, sampling_params=params())
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.last_receive_timestamp > 0
    [load] = (await stub.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_total_reqs, load.max_running_requests) == (0, 0, 4)
    assert (load.max_total_num_tokens, load.cache_hit_rate) == (1024, pytest.approx(1 / 3))


async def test_the_models_own_defaults_are_the_gateways_to_apply():
    defaults = SamplingParams(temperature=0.6, top_k=20)
    async with serving(defaults=defaults) as served, vllm_stub(served) as stub:
        told = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert json.loads(told.default_sampling_params_json) == {"temperature": 0.6, "top_k": 20}
        await ask(stub, sampling_params=params())
        given = served.engine.requests[-1].sampling
        assert (given.temperature, given.top_k) == (1.0, 0)


async def test_health_follows_the_engine(served: Served, stub, caplog):
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    served.engine.step_s = 0.01
    call = stub.Generate(pb.GenerateRequest(tokenized=TOKENS, stream=True))
    await call.read()
    served.engine.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    health = await stub.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, "ended" in health.message) == (False, True)
