"""The gRPC server: both services, health and reflection, TLS and keys. Imports no jax."""

import pathlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from jaxserve.config import ServerConfig
from jaxserve.entry import grpc_inference, grpc_vllm
from jaxserve.entry.api_keys import ApiKeys
from jaxserve.entry.failures import Unauthenticated, describe
from jaxserve.entry.front import Front
from jaxserve.entry.grpc_io import Context, give_up, service_handlers
from jaxserve.types import ConfigError

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICES = (grpc_inference.SERVICE, grpc_vllm.SERVICE)
OPEN_METHODS = (f"/{HEALTH}/", f"/{grpc_vllm.SERVICE.full_name}/HealthCheck")
"""Beginnings of methods that are served without a key: to probes."""
PING_MS = 10_000
"""How often clients may ask whether the connection still lives; gateways do while they wait."""


class KeyCheck(grpc.aio.ServerInterceptor):
    """Asks for a key, in the metadata `authorization: Bearer KEY`, but for OPEN_METHODS."""

    def __init__(self, keys: ApiKeys):
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        try:
            if not details.method.startswith(OPEN_METHODS):
                given = dict(details.invocation_metadata or ()).get("authorization", "")
                self._keys.check(given.encode())
        except Unauthenticated as error:
            failure = describe(error)

            async def refuse(requests: Any, context: Context) -> None:
                await give_up(context, failure)

            return grpc.stream_stream_rpc_method_handler(refuse)  # serves calls of any kind
        return await continuation(handler_call_details)


def tls_credentials(settings: ServerConfig) -> grpc.ServerCredentials | None:
    """What the settings ask for; None for a server without TLS.

    Raises: ConfigError for files that can't be read, or that don't hold what they should.
    """
    if settings.grpc_tls_cert is None or settings.grpc_tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = f"{settings.grpc_tls_cert!r} and grpc_tls_key {settings.grpc_tls_key!r}"
    try:
        certificate = pathlib.Path(settings.grpc_tls_cert).read_bytes()
        key = pathlib.Path(settings.grpc_tls_key).read_bytes()
        # grpc itself would accept what is no certificate, and then serve nobody.
        context.load_cert_chain(settings.grpc_tls_cert, settings.grpc_tls_key, password="")
    except (OSError, ValueError) as error:  # of ssl too
        raise ConfigError(f"grpc_tls_cert is {names}: {error}") from None
    authority = None
    if (path := settings.grpc_tls_client_ca) is not None:
        try:
            authority = pathlib.Path(path).read_bytes()
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"grpc_tls_client_ca is {path!r}: {error}") from None
    return grpc.ssl_server_credentials(
        [(key, certificate)], authority, require_client_auth=authority is not None
    )


class GrpcServer:
    """A gRPC server that is bound, and answers once started."""

    def __init__(self, front: Front, settings: ServerConfig):
        """Binds `settings.grpc_port`; 0 is a free one.

        Raises: OSError if it is taken, ConfigError for keys and TLS files that can't be used.
        """
        host, port = settings.host, settings.grpc_port
        credentials = tls_credentials(settings)
        self._server = grpc.aio.server(
            interceptors=[KeyCheck(ApiKeys(settings.all_api_keys()))],
            options=[
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", PING_MS),
            ],
        )
        servicers = (grpc_inference.Inference(front, settings), grpc_vllm.VllmEngine(front))
        self._server.add_generic_rpc_handlers(
            [service_handlers(*pair) for pair in zip(SERVICES, servicers, strict=True)]
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [service.full_name for service in SERVICES]
        names = (*self._names, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"gRPC can't listen on {address}: {error}") from None

    async def start(self) -> None:
        await self._server.start()
        await self.set_healthy(True)

    async def set_healthy(self, healthy: bool) -> None:
        """What the health service says from now on, to watchers too."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *self._names):
            await self._health.set(name, status.SERVING if healthy else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and ends those that still run after `grace_s`."""
        await self._server.stop(grace_s)
