"""Every Prometheus metric, named once. Imports no jax.

Names are vLLM's where the meaning is the same, with the prefix `jaxserve_`. Counters and gauges of
the engine are read from its last `EngineStats` when scraped; latencies are observed as requests
run.
"""

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxserve.types import BucketStats, EngineStats, FinishReason, Usage

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip

GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences being computed.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences waiting for a place.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV pages that sequences hold; 1 is all.",
        lambda s: s.pages_used / s.pages_total if s.pages_total else 0.0,
    ),
    ("kv_cache_pages", "KV pages there are.", lambda s: s.pages_total),
    (
        "prefix_cache_pages",
        "KV pages that hold cached prefixes and could be freed.",
        lambda s: s.pages_cached,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "prompt_tokens",
        "Prompt tokens of admitted requests, cached ones included.",
        lambda s: s.prompt_tokens,
    ),
    ("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prompt_tokens,
    ),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache had.", lambda s: s.cached_tokens),
    (
        "computed_tokens",
        "Tokens that went through the model, recomputed ones included.",
        lambda s: s.computed_tokens,
    ),
    (
        "num_preemptions",
        "Sequences put back to waiting for want of pages.",
        lambda s: s.num_preemptions,
    ),
    ("steps", "Steps of the engine.", lambda s: s.num_steps),
    (
        "grammar_forced_tokens",
        "Generated tokens that a grammar left no choice and that were not sampled.",
        lambda s: s.num_forced_tokens,
    ),
    (
        "num_grammar_cache_hit",
        "Requests whose grammar was compiled already, or was being compiled.",
        lambda s: s.num_grammar_hits,
    ),
    (
        "num_grammar_aborted",
        "Requests refused because of their grammar.",
        lambda s: s.num_grammar_failures,
    ),
    (
        "runtime_compiles",
        "Compilations after start-up; each is a fault.",
        lambda s: s.num_runtime_compiles,
    ),
)
BUCKET_COUNTERS: tuple[tuple[str, str, Callable[[BucketStats], float]], ...] = (
    ("bucket_steps", "Steps that ran in this compiled shape.", lambda b: b.num_steps),
    ("bucket_tokens", "Tokens that they computed.", lambda b: b.num_tokens),
    ("bucket_padding_tokens", "Room for tokens that they left empty.", lambda b: b.num_padding),
)


class EngineCollector(Collector):
    """Turns the engine's last counters into metrics, each time they are scraped."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]):
        self._labels = [model_name]
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self.stats()
        for name, help, value in GAUGES:
            gauge = GaugeMetricFamily(f"jaxserve_{name}", help, labels=["model_name"])
            gauge.add_metric(self._labels, value(stats))
            yield gauge
        for name, help, value in COUNTERS:
            counter = CounterMetricFamily(f"jaxserve_{name}", help, labels=["model_name"])
            counter.add_metric(self._labels, value(stats))
            yield counter
        for name, help, value in BUCKET_COUNTERS:
            labels = ["model_name", "kind", "size"]
            counter = CounterMetricFamily(f"jaxserve_{name}", help, labels=labels)
            for bucket in stats.buckets:
                counter.add_metric([*self._labels, bucket.kind, str(bucket.size)], value(bucket))
            yield counter
        compilation = SummaryMetricFamily(
            "jaxserve_grammar_compilation_time_seconds",
            "Compiling a grammar, failed ones included.",
            labels=["model_name"],
        )
        compilation.add_metric(self._labels, stats.num_grammars, stats.grammar_compile_s)
        yield compilation


class Metrics:
    """The metrics of one server, in their own registry; an observer of the client's requests."""

    def __init__(self):
        self.registry = CollectorRegistry(auto_describe=False)
        self._engine: EngineCollector | None = None
        self._model_name = ""

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"jaxserve_{name}", help, ["model_name"], buckets=buckets, registry=self.registry
            )

        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            TTFT_BUCKETS,
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a choice; a step that brings several counts once for each.",
            INTER_TOKEN_BUCKETS,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", E2E_BUCKETS
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self._generation_tokens = histogram(
            "request_generation_tokens",
            "Tokens generated for a request, all its choices.",
            TOKEN_BUCKETS,
        )
        self._params_n = histogram(
            "request_params_n", "Choices that a request asked for.", (1, 2, 5, 10, 20)
        )
        self._success = Counter(
            "jaxserve_request_success",
            "Requests that ended, by how their first choice did.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def serve(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        """Tells which model is observed from now on; `stats` gives its engine's counters.

        Called before the first observation, and for each engine that takes over: its counters
        start at 0 again, as Prometheus expects of a restart.
        """
        if self._engine is not None:
            self.registry.unregister(self._engine)
        self._engine = EngineCollector(model_name, stats)
        self.registry.register(self._engine)
        self._model_name = model_name
        for reason in get_args(FinishReason):
            self._success.labels(model_name, reason)

    # The client's Observer

    def on_request_start(self, num_prompt_tokens: int, num_choices: int) -> None:
        self._prompt_tokens.labels(self._model_name).observe(num_prompt_tokens)
        self._params_n.labels(self._model_name).observe(num_choices)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.labels(self._model_name).observe(seconds)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        if seconds is not None:
            for _ in range(num_tokens):
                self._inter_token.labels(self._model_name).observe(seconds / num_tokens)

    def on_request_finish(self, reason: FinishReason, usage: Usage, seconds: float) -> None:
        self._success.labels(self._model_name, reason).inc()
        self._generation_tokens.labels(self._model_name).observe(usage.completion_tokens)
        self._e2e.labels(self._model_name).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
