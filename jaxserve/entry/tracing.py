"""An OpenTelemetry span for each request, sent to a collector. Needs the extra `jaxserve[otel]`,
imported only when asked for; imports no jax.

Attributes follow the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/
gen-ai), and for latencies, which these leave to metrics, the names that vLLM uses.
"""

import asyncio
import time
import urllib.parse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxserve import __version__
from jaxserve.entry.failures import Failure
from jaxserve.types import ConfigError, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from jaxserve.entry.front import Record

SEND_S = 3.0
"""How long a batch of spans may take to be sent, tries included; at the server's end too."""
CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "grpc Chat": "chat",
    "/v1/embeddings": "embeddings",
}
"""By what a record's verb ends in; else text_completion."""
REQUEST_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


def trace_context(headers: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Of a request's headers or metadata, those that say which trace it belongs to."""
    return {
        str(name).lower(): str(value)
        for name, value in headers
        if str(name).lower() in CONTEXT_HEADERS
    }


class Tracer:
    """Makes a span of each request that ends, and sends them in batches, from a thread of its
    own. What the collector does not take is dropped and logged."""

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None):
        """`endpoint`: where OTLP is taken over HTTP; `exporter`: another way out, told at once.

        Raises: ConfigError without the packages, or for an endpoint that is no such URL.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry ({error.name} is not installed); "
                "pip install 'jaxserve[otel]'"
            ) from None
        url = urllib.parse.urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}; allowed: an http or https URL that takes "
                "OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces"
            )
        ours = Resource({"service.name": "jaxserve", "service.version": __version__})
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=SEND_S))
            if exporter is None
            else SimpleSpanProcessor(exporter)
        )
        self._tracer = self._provider.get_tracer("jaxserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, record: "Record", status: str, failure: Failure | None) -> None:
        """A request has ended, with this HTTP status or gRPC code."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        operation = next(
            (name for end, name in OPERATIONS.items() if record.verb.endswith(end)),
            "text_completion",
        )
        model = record.model_name
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(record.trace_context),
            kind=SpanKind.SERVER,
            start_time=end_ns - int(record.elapsed_s * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jaxserve",
                "gen_ai.request.model": model,
                **_protocol(record.verb, status),
                **_outcome(record),
            },
        )
        if failure is not None:
            span.set_attribute("error.type", failure.code or failure.type)
            if failure.status >= 500:  # others are the client's own
                span.set_status(Status(StatusCode.ERROR, failure.code or failure.type))
        span.end(end_ns)

    async def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        closing = asyncio.to_thread(self._provider.shutdown)
        await asyncio.wait([asyncio.ensure_future(closing)], timeout=SEND_S)


def _protocol(verb: str, status: str) -> dict[str, str | int]:
    method, _, path = verb.partition(" ")
    if method == "grpc":
        return {
            "rpc.system": "grpc",
            "rpc.method": path,
            "rpc.response.status_code": status,
        }
    return {
        "http.request.method": method,
        "url.path": path,
        "http.response.status_code": int(status),
    }


def _outcome(record: "Record") -> dict[str, Any]:
    """What was asked of the engine, and what came of it; nothing of a request that it never had."""
    if not record.streams:
        return {}
    params, usage, times = record.streams[0].params, record.usage(), record.streams[0].times()
    found: dict[str, Any] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model_name,
        "gen_ai.response.finish_reasons": list(record.finish_reasons),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.e2e": record.elapsed_s,
        **_request(params),
    }
    if times.queue_s is not None:
        found["gen_ai.latency.time_in_queue"] = times.queue_s
    if times.first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = times.first_token_s
    return found


def _request(params: SamplingParams) -> dict[str, Any]:
    """What a request says of how to sample; not what it leaves open."""
    default = SamplingParams()
    found: dict[str, Any] = {
        f"gen_ai.request.{name}": getattr(params, name)
        for name in REQUEST_FIELDS
        if getattr(params, name) != getattr(default, name)
    }
    if params.stop:
        found["gen_ai.request.stop_sequences"] = list(params.stop)
    if params.n != 1:
        found["gen_ai.request.choice.count"] = params.n
    return found
