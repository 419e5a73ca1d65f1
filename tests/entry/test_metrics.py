"""Metrics: names, values, and one registry each."""

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import fake_info

from jaxserve import metrics as metrics_module
from jaxserve.metrics import Metrics
from jaxserve.observation import Histogram, step_histogram
from jaxserve.types import BucketStats, EngineStats, RequestTimes, SamplingParams, Usage

UNITS = ("_seconds", "_tokens", "_bytes", "_ratio", "_perc", "_pages", "_info")
COUNTS = {
    "num_requests_running", "num_requests_waiting", "num_grammar_queue_reqs", "request_params_n",
    "request_params_max_tokens", "num_preemptions", "corrupted_requests", "steps", "bucket_steps",
    "compiles", "num_grammar", "num_grammar_cache_hit", "num_grammar_aborted",
    "num_grammar_timeout", "request_success", "admission_rejections", "prefix_cache_queries",
    "prefix_cache_hits", "prompt_tokens_cached", "iteration_tokens_total", "http_responses",
}  # fmt: skip
"""Plain counts, and names of vLLM's whose unit is not at their end."""


def values(metrics: Metrics) -> dict[str, float]:
    """By name and values of labels but the model's."""
    return {
        sample.name.removeprefix("jaxserve_")
        + "".join(f"[{v}]" for k, v in sorted(sample.labels.items()) if k != "model_name"):
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "le" not in sample.labels
    }  # fmt: skip


def serving(stats: EngineStats | None = None) -> Metrics:
    metrics = Metrics()
    metrics.serve("m", lambda: stats or EngineStats(), fake_info())
    return metrics


def test_every_metric_is_there_before_the_first_request_with_its_unit_and_help():
    families = list(text_string_to_metric_families(serving().render().decode()))
    names = [family.name.removeprefix("jaxserve_") for family in families]
    assert len(set(names)) == len(names) > 40
    assert all(family.name.startswith("jaxserve_") for family in families)
    assert all(re.search(r"\w\.$", family.documentation) for family in families)
    assert {n for n in names if not n.endswith(UNITS)} == {
        n for n in COUNTS if not n.endswith(UNITS)
    }
    assert values(serving())["request_success_total[abort]"] == 0


def test_no_label_grows_with_the_requests():
    labels = {
        label
        for family in text_string_to_metric_families(serving().render().decode())
        for sample in family.samples
        for label in sample.labels
    }
    config = {"page_size", "num_pages", "max_model_len", "max_num_seqs", "dtype", "attention"}
    assert labels - config - {"device_kind"} == {
        "model_name", "finished_reason", "state", "phase", "le"
    }  # fmt: skip
    used = {"kind", "size"}  # of steps, and the compiled shapes
    declared = {
        label
        for numbers in (*metrics_module.GAUGES, *metrics_module.COUNTERS)
        for label in numbers.labels
    }
    assert declared - config - {"device_kind"} == {"state", "phase", *used}


def test_values_come_from_the_engine_and_the_observer():
    metrics = serving(
        EngineStats(
            num_running=3, pages_used=5, pages_cached=2, pages_total=10, prompt_tokens=100,
            cached_tokens=40, evicted_pages=3, num_runtime_compiles=1, runtime_compile_s=0.5,
        )
    )  # fmt: skip
    metrics.on_request_start(100, SamplingParams(n=2, max_tokens=7))
    metrics.on_first_token(0.25)
    metrics.on_tokens(1, None)
    metrics.on_tokens(4, 0.4)
    metrics.on_request_finish(
        "stop",
        Usage(prompt_tokens=100, completion_tokens=8, cached_tokens=32),
        RequestTimes(total_s=0.65, queue_s=0.1, first_token_s=0.25, longest=5),
    )
    metrics.on_refused()
    metrics.on_response("/v1/completions", 200)
    metrics.on_response("/v1/completions", 200)
    expected = {
        "num_requests_running": 3, "kv_cache_usage_perc": 0.5, "kv_cache_pages[free]": 3,
        "kv_cache_pages[cached]": 2, "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40, "prefix_cache_hit_ratio": 0.4, "evicted_tokens_total": 48,
        "compiles_total[startup]": 2, "compiles_total[runtime]": 1,
        "compile_seconds_total[runtime]": 0.5, "admission_rejections_total": 1,
        "time_to_first_token_seconds_sum": 0.25, "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": 0.4, "request_success_total[stop]": 1,
        "request_generation_tokens_sum": 8, "request_max_num_generation_tokens_sum": 5,
        "request_prefill_kv_computed_tokens_sum": 68, "request_queue_time_seconds_sum": 0.1,
        "request_prefill_time_seconds_sum": 0.15, "request_decode_time_seconds_sum": 0.4,
        "request_inference_time_seconds_sum": 0.55, "e2e_request_latency_seconds_sum": 0.65,
        "request_time_per_output_token_seconds_sum": 0.1, "request_params_n_sum": 2,
        "request_params_max_tokens_sum": 7, "request_prompt_tokens_sum": 100,
        "http_responses_total[/v1/completions][200]": 2,
    }  # fmt: skip
    found = values(metrics)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_histograms_count_by_size_as_prometheus_wants_it():
    steps = step_histogram()
    for seconds, times in ((0.0005, 1), (0.0031, 2), (100.0, 1)):
        steps.observe(seconds, times)
    metrics = serving(EngineStats(step_seconds={"decode": steps}))
    buckets = {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == "jaxserve_step_time_seconds_bucket"
    }
    for bound, count in buckets.items():
        assert count == sum(n for s, n in ((0.0005, 1), (0.0031, 2), (100.0, 1)) if s <= bound)
    assert math.inf in buckets
    found = values(metrics)
    assert found["step_time_seconds_count[decode]"] == 4
    assert found["step_time_seconds_sum[decode]"] == pytest.approx(100.0067)


def test_a_copy_of_a_histogram_stays_as_it_was():
    histogram = Histogram.of((1.0,))
    histogram.observe(0.5)
    copy = histogram.copy()
    histogram.observe(2.0)
    assert (copy.counts, copy.total, copy.count) == ([1, 0], 0.5, 1)
    assert (histogram.counts, histogram.total, histogram.count) == ([1, 1], 2.5, 2)


def test_padding_is_told_by_bucket():
    buckets = (BucketStats("decode", 4, 3, 10), BucketStats("mixed", 64, 2, 100))
    found = values(serving(EngineStats(buckets=buckets)))
    assert {name: value for name, value in found.items() if name.startswith("bucket_")} == {
        "bucket_steps_total[decode][4]": 3, "bucket_steps_total[mixed][64]": 2,
        "bucket_tokens_total[decode][4]": 10, "bucket_tokens_total[mixed][64]": 100,
        "bucket_padding_tokens_total[decode][4]": 2, "bucket_padding_tokens_total[mixed][64]": 28,
    }  # fmt: skip


def test_a_new_engine_takes_over():
    metrics = serving(EngineStats(prompt_tokens=7))
    metrics.serve("m", lambda: EngineStats(prompt_tokens=2), fake_info())
    assert values(metrics)["prompt_tokens_total"] == 2


def test_servers_share_nothing():
    one, other = serving(), serving()
    one.on_first_token(1.0)
    assert values(other)["time_to_first_token_seconds_count"] == 0
