"""TLS and keys of the gRPC server, with certificates made here."""

import contextlib
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_fakes import finish, serving, serving_http

from jaxserve.config import ServerConfig
from jaxserve.entry.grpc_server import tls_credentials
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.proto import jaxserve_pb2_grpc, vllm_engine_pb2_grpc
from jaxserve.entry.proto import vllm_engine_pb2 as vllm
from jaxserve.types import ConfigError

KEYS = ("first", "second")


class Files:
    """A server's certificate with its key, the authority behind it, and a client's of the same."""

    def __init__(self, folder: pathlib.Path):
        self.authority, self.folder = trustme.CA(), folder
        self.client = self.authority.issue_cert("client@example.com")
        server = self.authority.issue_cert("localhost")
        chain = b"".join(blob.bytes() for blob in server.cert_chain_pems)
        self.cert = self.write("cert.pem", chain)
        self.key = self.write("key.pem", server.private_key_pem.bytes())
        self.ca = self.write("ca.pem", self.authority.cert_pem.bytes())

    def write(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)

    @property
    def settings(self) -> dict[str, str]:
        return {"grpc_tls_cert": self.cert, "grpc_tls_key": self.key}

    def credentials(self, leaf: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
        """A client's that trusts the authority; with `leaf` it shows that one itself."""
        root = self.authority.cert_pem.bytes()
        if leaf is None:
            return grpc.ssl_channel_credentials(root)
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        return grpc.ssl_channel_credentials(root, leaf.private_key_pem.bytes(), chain)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


async def text_over(channel: grpc.aio.Channel, **options: Any) -> str:
    stub: Any = jaxserve_pb2_grpc.InferenceStub(channel)
    request = pb.TokenizeRequest(text="a")
    return str((await stub.Tokenize(request, timeout=10, **options)).token_ids)


async def code_of(call: Any) -> str:
    try:
        await finish(call)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def secure(target: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    options = (("grpc.ssl_target_name_override", "localhost"),)
    return grpc.aio.secure_channel(target, credentials, options)


async def test_tls(files: Files):
    async with serving(**files.settings) as served:
        assert f"gRPC      {served.target} (TLS)\n" in served.out.getvalue()
        async with secure(served.target, files.credentials()) as channel:
            assert await text_over(channel) == "[64]"
        for channel in (
            secure(served.target, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())),
            grpc.aio.insecure_channel(served.target),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await text_over(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_must_show_a_certificate_of_the_authority(files: Files):
    stranger = trustme.CA().issue_cert("client@example.com")
    async with serving(**files.settings, grpc_tls_client_ca=files.ca) as served:
        async with secure(served.target, files.credentials(files.client)) as channel:
            assert await text_over(channel) == "[64]"
        for leaf in (None, stranger):
            async with secure(served.target, files.credentials(leaf)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await text_over(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_keys_over_tls(files: Files):
    credentials = grpc.composite_channel_credentials(
        files.credentials(), grpc.access_token_call_credentials("second")
    )
    async with serving(**files.settings, api_key=KEYS) as served:
        async with secure(served.target, credentials) as channel:
            assert await text_over(channel) == "[64]"
        async with secure(served.target, files.credentials()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await text_over(channel)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@contextlib.asynccontextmanager
async def keyed() -> AsyncIterator[tuple[Any, grpc.aio.Channel]]:
    async with (
        serving(api_key=KEYS) as served,
        grpc.aio.insecure_channel(served.target) as channel,
    ):
        yield served, channel


async def test_only_calls_with_a_key_are_served():
    async with keyed() as (served, channel):
        ours: Any = jaxserve_pb2_grpc.InferenceStub(channel)
        theirs: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        services = reflection_pb2.ServerReflectionRequest(list_services="")
        wrong = ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer first2", "Bearer firs")
        for given in ((), *(((("authorization", value),)) for value in wrong)):
            calls = [
                ours.Generate(pb.GenerateRequest(text="a"), metadata=given),
                ours.GetModelInfo(pb.GetModelInfoRequest(), metadata=given),
                ours.Abort(pb.AbortRequest(abort_all=True), metadata=given),
                theirs.Generate(vllm.GenerateRequest(text="a"), metadata=given),
                theirs.GetLoads(vllm.GetLoadsRequest(), metadata=given),
                reflection.ServerReflectionInfo(iter([services]), metadata=given),
                channel.unary_unary("/jaxserve.v1.Inference/Nothing")(b"", metadata=given),
            ]
            found = [await code_of(call) for call in calls]
            assert found == ["UNAUTHENTICATED"] * len(calls)
        assert served.engine.requests == []
        for key in KEYS:
            given = (("authorization", f"bearer {key}"),)
            calls = [
                ours.Generate(pb.GenerateRequest(text="a"), metadata=given),
                theirs.GetLoads(vllm.GetLoadsRequest(), metadata=given),
                reflection.ServerReflectionInfo(iter([services]), metadata=given),
            ]
            assert {await code_of(call) for call in calls} == {"OK"}


async def test_health_needs_no_key():
    async with keyed() as (_, channel):
        health: Any = health_pb2_grpc.HealthStub(channel)
        theirs: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await theirs.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_one_setting_guards_both_servers():
    async with serving_http(api_key=KEYS) as (served, http):
        headers = {"authorization": "Bearer first"}
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        async with grpc.aio.insecure_channel(served.target) as channel:
            assert await text_over(channel, metadata=tuple(headers.items())) == "[64]"


def wrong_files(files: Files) -> Mapping[str, dict[str, Any]]:
    other = files.write("other.pem", trustme.CA().issue_cert("x").private_key_pem.bytes())
    text = files.write("text.pem", b"no certificate")
    missing = str(files.folder / "missing.pem")
    return {
        "grpc_tls_cert": {"grpc_tls_cert": missing},
        "grpc_tls_cert is '.*text": {"grpc_tls_cert": text},
        "grpc_tls_key '.*other": {"grpc_tls_key": other},
        "grpc_tls_client_ca is '.*text": {"grpc_tls_client_ca": text},
        "grpc_tls_client_ca is '.*missing": {"grpc_tls_client_ca": missing},
    }


def test_files_that_cannot_serve_are_refused_before_the_start(files: Files):
    for words, change in wrong_files(files).items():
        settings = ServerConfig(**{"grpc_port": 0, **files.settings, **change})
        with pytest.raises(ConfigError, match=words):
            tls_credentials(settings)
    for fields in (
        {"grpc_tls_cert": files.cert}, {"grpc_tls_key": files.key},
        {"grpc_tls_client_ca": files.ca}, {**files.settings, "grpc_port": None},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"grpc_tls_.* is given without grpc_"):
            ServerConfig(**{"grpc_port": 0, **fields})


async def test_the_server_does_not_start_with_them(files: Files):
    with pytest.raises(ConfigError, match="grpc_tls_cert"):
        async with serving(grpc_tls_cert=files.key, grpc_tls_key=files.key):
            pass
