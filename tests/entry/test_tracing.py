"""Spans of requests: names and attributes, the trace they belong to, and how they reach a
collector."""

import asyncio
import http.server
import sys
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes
from opentelemetry.trace import SpanKind, StatusCode
from server_fakes import serving_grpc, serving_http

from jaxserve import __version__
from jaxserve.config import ServerConfig
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.serve import Server
from jaxserve.entry.tracing import Tracer
from jaxserve.types import ConfigError

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, http_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


def attach(served) -> InMemorySpanExporter:
    """The spans of a fake server, from now on."""
    exporter = InMemorySpanExporter()
    tracer = Tracer("http://127.0.0.1:1/v1/traces", exporter)
    served.server.tracer = tracer
    served.server.front.tracer = tracer
    return exporter


async def test_a_request_is_a_span_of_its_callers_trace():
    async with serving_http() as (served, http):
        exporter = attach(served)
        served.engine.cached = 2
        body = {
            **CHAT, "temperature": 0.5, "seed": 0, "stop": ["zz"], "n": 2, "top_k": 9,
        }  # fmt: skip
        answer = await http.post(
            "/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT}
        )
        assert answer.status_code == 200
        [span] = exporter.get_finished_spans()
        assert (span.name, span.kind) == ("chat tiny", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        attributes = dict(span.attributes)
        latencies = {n: attributes.pop(n) for n in list(attributes) if ".latency." in n}
        assert attributes == {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny",
            "gen_ai.response.id": answer.json()["id"],
            "gen_ai.response.finish_reasons": ("length", "length"),
            "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 0, "gen_ai.request.top_k": 9,
            "gen_ai.request.stop_sequences": ("zz",), "gen_ai.request.choice.count": 2,
            "http.request.method": "POST", "url.path": "/v1/chat/completions",
            "http.response.status_code": 200,
        }  # fmt: skip
        known = CONVENTIONS | {"url.path"}
        assert attributes.keys() - known <= {"gen_ai.usage.cache_read.input_tokens"}
        queue_s = latencies["gen_ai.latency.time_in_queue"]
        assert queue_s == 0.25  # as the fake engine says
        total_s = latencies["gen_ai.latency.e2e"]
        assert 0 < latencies["gen_ai.latency.time_to_first_token"] <= total_s
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(total_s, abs=0.05)


async def test_streams_and_failures_and_requests_without_a_trace():
    async with serving_http() as (served, http):
        exporter = attach(served)
        async with http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True}
        ) as s:
            assert [line async for line in s.aiter_lines()][-2] == "data: [DONE]"
        await http.post("/v1/completions", json={"prompt": "", "max_tokens": 3})
        served.engine.die()
        while (await http.post("/v1/completions", json={"prompt": "a"})).status_code != 503:
            await asyncio.sleep(0.01)
        spans = exporter.get_finished_spans()
        streamed, refused, failed = spans[0], spans[1], spans[-1]
        assert (streamed.name, streamed.parent) == ("text_completion tiny", None)
        assert streamed.attributes["gen_ai.usage.output_tokens"] == 16
        assert refused.attributes["http.response.status_code"] == 400
        assert refused.attributes["error.type"] == "invalid_request_error"
        assert refused.status.status_code == StatusCode.UNSET, "the client's own fault"
        assert "gen_ai.response.id" not in refused.attributes
        assert failed.attributes["http.response.status_code"] == 503
        assert failed.status.status_code == StatusCode.ERROR
        assert len({span.context.trace_id for span in spans}) == len(spans)


async def test_grpc_calls_bring_their_trace_in_their_metadata():
    async with serving_grpc() as (served, stub):
        exporter = attach(served)
        request = pb.GenerateRequest(text="abc")
        request.sampling.max_tokens = 4
        call = stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
        assert len([delta async for delta in call]) == 4
        async with asyncio.timeout(2):
            while not exporter.get_finished_spans():
                await asyncio.sleep(0.005)
        [span] = exporter.get_finished_spans()
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.name == "text_completion tiny"
        assert span.attributes["rpc.system"] == "grpc"
        assert span.attributes["rpc.response.status_code"] == "OK"
        assert span.attributes["gen_ai.usage.output_tokens"] == 4


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a real one does."""

    daemon_threads = True

    def __init__(self):
        self.received: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                collector.received.append(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)


async def test_spans_reach_a_collector_before_the_server_has_ended():
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        async with serving_http(otlp_traces_endpoint=url) as (_, http):
            for _ in range(3):
                await http.post("/v1/chat/completions", json=CHAT)
    finally:
        await asyncio.to_thread(collector.shutdown)
        collector.server_close()
        thread.join()
    resources = [one for request in collector.received for one in request.resource_spans]
    spans = [s for r in resources for scope in r.scope_spans for s in scope.spans]
    assert [span.name for span in spans] == ["chat tiny"] * 3
    said = {a.key: a.value.string_value for a in resources[0].resource.attributes}
    assert said["service.name"] == "jaxserve"
    assert said["service.version"] == __version__


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs .*jaxserve\[otel\]"):
        Server(
            None,  # pyright: ignore[reportArgumentType]
            ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"),
        )


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://127.0.0.1:4317", "http://", ""])
def test_an_endpoint_must_be_a_url(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is"):
        Tracer(endpoint)
