"""Every Prometheus metric, named once. Imports no jax.

Names are vLLM's where the meaning is the same, else SGLang's, with the prefix `jaxserve_`. What the
engine counts is read from its last `EngineStats` when scraped; latencies are observed as requests
run.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.observation import Histogram
from jaxserve.types import (
    BucketStats,
    EngineInfo,
    EngineStats,
    FinishReason,
    RequestTimes,
    SamplingParams,
    Usage,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_TIME_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip
CHOICE_BOUNDS = (1, 2, 5, 10, 20, 50, 100)

type Labelled[V] = Iterable[tuple[tuple[str, ...], V]]
"""Values, each with those of its labels."""


class Numbers(NamedTuple):
    """A gauge or a counter of what the engine says."""

    name: str
    help: str
    values: Callable[[EngineStats, EngineInfo], float | Labelled[float]]
    labels: tuple[str, ...] = ()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _buckets(value: Callable[[BucketStats], float]) -> Callable[..., Labelled[float]]:
    return lambda s, i: [((b.kind, str(b.size)), value(b)) for b in s.buckets]


GAUGES = (
    Numbers("num_requests_running", "Sequences being computed.", lambda s, i: s.num_running),
    Numbers("num_requests_waiting", "Sequences waiting for a place.", lambda s, i: s.num_waiting),
    Numbers(
        "num_grammar_queue_reqs",
        "Of those waiting, sequences whose grammar is being compiled.",
        lambda s, i: s.num_grammars_compiling,
    ),
    Numbers(
        "kv_cache_usage_perc",
        "Share of the KV pages that sequences hold; 1 is all.",
        lambda s, i: _ratio(s.pages_used, s.pages_total),
    ),
    Numbers(
        "kv_cache_pages",
        "KV pages by state: used by sequences, cached (they only hold prefixes and can be freed), "
        "free.",
        lambda s, i: [
            (("used",), s.pages_used),
            (("cached",), s.pages_cached),
            (("free",), s.pages_total - s.pages_used - s.pages_cached),
        ],
        ("state",),
    ),
    Numbers(
        "prefix_cache_hit_ratio",
        "Share of all prompt tokens so far that the prefix cache had.",
        lambda s, i: _ratio(s.cached_tokens, s.prompt_tokens),
    ),
    Numbers("kv_cache_bytes", "Memory of the KV pages, all devices.", lambda s, i: i.kv_bytes),
    Numbers("weight_bytes", "Memory of the weights.", lambda s, i: i.weight_bytes),
    Numbers(
        "startup_time_seconds",
        "Start-up by phase: load (weights) and compile run side by side, total is all of it.",
        lambda s, i: [
            (("load",), i.load_s),
            (("compile",), i.compile_s),
            (("total",), i.startup_s),
        ],
        ("phase",),
    ),
    Numbers(
        "cache_config_info",
        "Always 1; how the engine is set up, in its labels.",
        lambda s, i: [
            (
                (
                    str(i.page_size),
                    str(i.num_pages),
                    str(i.max_model_len),
                    str(i.max_num_seqs),
                    i.dtype,
                    i.attention,
                    i.device_kind,
                ),
                1,
            )
        ],
        (
            "page_size",
            "num_pages",
            "max_model_len",
            "max_num_seqs",
            "dtype",
            "attention",
            "device_kind",
        ),
    ),
)
COUNTERS = (
    Numbers(
        "prompt_tokens",
        "Prompt tokens of admitted requests, cached ones included.",
        lambda s, i: s.prompt_tokens,
    ),
    Numbers(
        "prompt_tokens_cached",
        "Prompt tokens that were not computed, for the prefix cache had them.",
        lambda s, i: s.cached_tokens,
    ),
    Numbers("generation_tokens", "Tokens generated.", lambda s, i: s.generated_tokens),
    Numbers(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s, i: s.prompt_tokens,
    ),
    Numbers(
        "prefix_cache_hits",
        "Prompt tokens that the prefix cache had.",
        lambda s, i: s.cached_tokens,
    ),
    Numbers(
        "evicted_tokens",
        "Tokens that the prefix cache gave up.",
        lambda s, i: s.evicted_pages * i.page_size,
    ),
    Numbers(
        "computed_tokens",
        "Tokens that went through the model, recomputed ones included.",
        lambda s, i: s.computed_tokens,
    ),
    Numbers(
        "num_preemptions",
        "Sequences put back to waiting for want of pages.",
        lambda s, i: s.num_preemptions,
    ),
    Numbers(
        "corrupted_requests",
        "Requests ended because the model's output was no number.",
        lambda s, i: s.num_corrupted,
    ),
    Numbers("steps", "Steps of the engine.", lambda s, i: s.num_steps),
    Numbers(
        "bucket_steps",
        "Steps that ran in this compiled shape.",
        _buckets(lambda b: b.num_steps),
        ("kind", "size"),
    ),
    Numbers(
        "bucket_tokens",
        "Tokens that they computed.",
        _buckets(lambda b: b.num_tokens),
        ("kind", "size"),
    ),
    Numbers(
        "bucket_padding_tokens",
        "Room for tokens that they left empty.",
        _buckets(lambda b: b.num_padding),
        ("kind", "size"),
    ),
    Numbers(
        "compiles",
        "Programs compiled or taken from the compile cache, by phase; each at runtime is a fault.",
        lambda s, i: [(("startup",), i.num_compiled), (("runtime",), s.num_runtime_compiles)],
        ("phase",),
    ),
    Numbers(
        "compile_seconds",
        "Seconds that compiling took, by phase.",
        lambda s, i: [(("startup",), i.compile_s), (("runtime",), s.runtime_compile_s)],
        ("phase",),
    ),
    Numbers("num_grammar", "Requests that had a grammar.", lambda s, i: s.num_grammar_requests),
    Numbers(
        "num_grammar_cache_hit",
        "Requests whose grammar was compiled already, or was being compiled.",
        lambda s, i: s.num_grammar_hits,
    ),
    Numbers(
        "num_grammar_aborted",
        "Requests refused because of their grammar.",
        lambda s, i: s.num_grammar_failures,
    ),
    Numbers(
        "num_grammar_timeout",
        "Of these, those whose grammar took too long to compile.",
        lambda s, i: s.num_grammar_timeouts,
    ),
    Numbers(
        "grammar_forced_tokens",
        "Generated tokens that a grammar left no choice and that were not sampled.",
        lambda s, i: s.num_forced_tokens,
    ),
)


class Histograms(NamedTuple):
    """A histogram that the engine keeps."""

    name: str
    help: str
    values: Callable[[EngineStats], Labelled[Histogram]]
    labels: tuple[str, ...] = ()


ENGINE_HISTOGRAMS = (
    Histograms(
        "step_time_seconds",
        "A step, from when the device could begin with it until its tokens were read.",
        lambda s: [((kind,), s.step_seconds[kind]) for kind in sorted(s.step_seconds)],
        ("kind",),
    ),
    Histograms(
        "host_gap_seconds",
        "What the host does between two waits for the device, in which the next step is sent.",
        lambda s: [((), s.host_gap_seconds)],
    ),
    Histograms(
        "iteration_tokens_total", "Tokens that a step computes.", lambda s: [((), s.step_tokens)]
    ),
    Histograms(
        "grammar_compilation_time_seconds",
        "Compiling a grammar, failed ones included.",
        lambda s: [((), s.grammar_compile_seconds)],
    ),
)
REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        FIRST_TOKEN_BOUNDS,
    ),
    "inter_token_latency_seconds": (
        "Between two tokens of a choice; a step that brings several counts once for each.",
        TOKEN_TIME_BOUNDS,
    ),
    "request_time_per_output_token_seconds": (
        "A request's mean time per token after its first.",
        TOKEN_TIME_BOUNDS,
    ),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", REQUEST_BOUNDS),
    "request_queue_time_seconds": (
        "From a request's arrival until a step first computes something of it.",
        REQUEST_BOUNDS,
    ),
    "request_prefill_time_seconds": ("From then to its first token.", REQUEST_BOUNDS),
    "request_decode_time_seconds": ("From its first token to its end.", REQUEST_BOUNDS),
    "request_inference_time_seconds": ("Prefill and decode together.", REQUEST_BOUNDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKEN_BOUNDS),
    "request_prefill_kv_computed_tokens": (
        "Of these, those that the prefix cache did not have.",
        (0, *TOKEN_BOUNDS),
    ),
    "request_generation_tokens": (
        "Tokens generated for a request, all its choices.",
        TOKEN_BOUNDS,
    ),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", TOKEN_BOUNDS),
    "request_params_n": ("Choices that a request asked for.", CHOICE_BOUNDS),
    "request_params_max_tokens": ("The max_tokens of requests that give it.", TOKEN_BOUNDS),
}


def _histogram_family(
    name: str, help: str, labels: Iterable[str], values: Labelled[Histogram]
) -> Metric:
    family = HistogramMetricFamily(f"jaxserve_{name}", help, labels=[*labels])
    for label_values, histogram in values:
        total, buckets = 0, list[tuple[str, float]]()
        bounds = (*histogram.bounds, float("inf"))
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric([*label_values], buckets, histogram.total)
    return family


class Metrics(Collector):
    """The metrics of one server, in their own registry; an observer of the client's requests.

    Each has a label `model_name`.
    """

    def __init__(self):
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._model_name: str | None = None
        self._stats: Callable[[], EngineStats] = EngineStats
        self._info: EngineInfo | None = None
        self._requests: Mapping[str, Histogram] = {
            name: Histogram.of(bounds) for name, (_, bounds) in REQUEST_HISTOGRAMS.items()
        }
        self._inter_token = self._requests["inter_token_latency_seconds"]
        self._finished: dict[FinishReason, int] = {reason: 0 for reason in get_args(FinishReason)}
        self._num_refused = 0
        self._responses: collections.Counter[tuple[str, int]] = collections.Counter()

    def serve(self, model_name: str, stats: Callable[[], EngineStats], info: EngineInfo) -> None:
        """Tells which model is observed from now on; `stats` gives its engine's counters.

        Called before the first observation, and for each engine that takes over: its counters
        start at 0 again, as Prometheus expects of a restart.
        """
        self._model_name, self._stats, self._info = model_name, stats, info

    def on_response(self, endpoint: str, status: int) -> None:
        """An HTTP response begins; `endpoint` and `status` are each one of few."""
        self._responses[endpoint, status] += 1

    # The client's Observer

    def on_refused(self) -> None:
        self._num_refused += 1

    def on_request_start(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._requests["request_prompt_tokens"].observe(num_prompt_tokens)
        self._requests["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._requests["request_params_max_tokens"].observe(params.max_tokens)

    def on_first_token(self, seconds: float) -> None:
        self._requests["time_to_first_token_seconds"].observe(seconds)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        if seconds is not None:
            self._inter_token.observe(seconds / num_tokens, num_tokens)

    def on_request_finish(self, reason: FinishReason, usage: Usage, times: RequestTimes) -> None:
        requests, first_s, queue_s = self._requests, times.first_token_s, times.queue_s
        self._finished[reason] += 1
        requests["e2e_request_latency_seconds"].observe(times.total_s)
        requests["request_generation_tokens"].observe(usage.completion_tokens)
        requests["request_max_num_generation_tokens"].observe(times.longest)
        if queue_s is not None:
            requests["request_queue_time_seconds"].observe(queue_s)
            requests["request_inference_time_seconds"].observe(times.total_s - queue_s)
        if first_s is None:
            return
        computed = usage.prompt_tokens - usage.cached_tokens
        requests["request_prefill_kv_computed_tokens"].observe(computed)
        requests["request_decode_time_seconds"].observe(times.total_s - first_s)
        if queue_s is not None:
            requests["request_prefill_time_seconds"].observe(max(0.0, first_s - queue_s))
        if times.longest > 1:
            each_s = (times.total_s - first_s) / (times.longest - 1)
            requests["request_time_per_output_token_seconds"].observe(each_s)

    # Prometheus

    def collect(self) -> Iterator[Metric]:
        """Every metric; none before `serve`."""
        if self._model_name is None or self._info is None:
            return
        stats, info, model = self._stats(), self._info, self._model_name
        for kind, numbers in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, help, values, labels in numbers:
                family = kind(f"jaxserve_{name}", help, labels=["model_name", *labels])
                found = values(stats, info)
                listed = [((), found)] if isinstance(found, int | float) else found
                for label_values, value in listed:
                    family.add_metric([model, *label_values], value)
                yield family
        success = CounterMetricFamily(
            "jaxserve_request_success",
            "Requests that ended, by how their first choice did.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._finished.items():
            success.add_metric([model, reason], count)
        yield success
        refused = CounterMetricFamily(
            "jaxserve_admission_rejections",
            "Requests not taken, as many as may be being in flight.",
            labels=["model_name"],
        )
        refused.add_metric([model], self._num_refused)
        yield refused
        responses = CounterMetricFamily(
            "jaxserve_http_responses",
            "HTTP responses by endpoint, unknown where a request came to none, and status.",
            labels=["model_name", "endpoint", "status_code"],
        )
        for (endpoint, status), count in self._responses.items():
            responses.add_metric([model, endpoint, str(status)], count)
        yield responses
        for name, help, values, labels in ENGINE_HISTOGRAMS:
            listed = [((model, *label_values), one) for label_values, one in values(stats)]
            yield _histogram_family(name, help, ("model_name", *labels), listed)
        for name, (help, _) in REQUEST_HISTOGRAMS.items():
            own = [((model,), self._requests[name])]
            yield _histogram_family(name, help, ("model_name",), own)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
