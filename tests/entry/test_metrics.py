"""Metrics: names, values, and one registry each."""

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import Metrics
from jaxserve.types import BucketStats, EngineStats, Usage

NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
    "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "runtime_compiles", "grammar_compilation_time_seconds",
    "num_grammar_cache_hit", "num_grammar_aborted", "grammar_forced_tokens",
}  # fmt: skip


def values(metrics: Metrics) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{v}]" for k, v in sample.labels.items() if k == "finished_reason"):
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "le" not in sample.labels
    }  # fmt: skip


def test_every_name_is_there_before_the_first_request():
    metrics = Metrics()
    metrics.serve("m", EngineStats)
    families = {
        family.name: family for family in text_string_to_metric_families(metrics.render().decode())
    }
    assert {f"jaxserve_{name}" for name in NAMES} <= set(families)
    assert all(name.startswith("jaxserve_") for name in families)
    assert all(family.documentation for family in families.values())
    assert values(metrics)["jaxserve_request_success_total[abort]"] == 0


def test_values_come_from_the_engine_and_the_observer():
    metrics = Metrics()
    stats = EngineStats(
        num_running=3, pages_used=5, pages_total=10, prompt_tokens=100, cached_tokens=40
    )
    metrics.serve("m", lambda: stats)
    metrics.on_request_start(100, 1)
    metrics.on_first_token(0.25)
    metrics.on_tokens(1, None)
    metrics.on_tokens(4, 0.4)
    metrics.on_request_finish("stop", Usage(prompt_tokens=100, completion_tokens=5), 0.65)
    found = values(metrics)
    assert found["jaxserve_num_requests_running"] == 3
    assert found["jaxserve_kv_cache_usage_perc"] == 0.5
    assert found["jaxserve_prefix_cache_queries_total"] == 100
    assert found["jaxserve_prefix_cache_hits_total"] == 40
    assert found["jaxserve_time_to_first_token_seconds_sum"] == 0.25
    assert found["jaxserve_inter_token_latency_seconds_count"] == 4
    assert abs(found["jaxserve_inter_token_latency_seconds_sum"] - 0.4) < 1e-9
    assert found["jaxserve_request_success_total[stop]"] == 1
    assert found["jaxserve_request_generation_tokens_sum"] == 5


def test_padding_is_told_by_bucket():
    metrics = Metrics()
    buckets = (BucketStats("decode", 4, 3, 10), BucketStats("mixed", 64, 2, 100))
    metrics.serve("m", lambda: EngineStats(buckets=buckets))
    found = {
        (sample.name.removeprefix("jaxserve_bucket_"), sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.labels.get("size") in ("4", "64")
    }
    assert found == {
        ("steps_total", "decode"): 3, ("steps_total", "mixed"): 2,
        ("tokens_total", "decode"): 10, ("tokens_total", "mixed"): 100,
        ("padding_tokens_total", "decode"): 2, ("padding_tokens_total", "mixed"): 28,
    }  # fmt: skip


def test_a_new_engine_takes_over():
    metrics = Metrics()
    metrics.serve("m", lambda: EngineStats(prompt_tokens=7))
    metrics.serve("m", lambda: EngineStats(prompt_tokens=2))
    assert values(metrics)["jaxserve_prompt_tokens_total"] == 2


def test_servers_share_nothing():
    one, other = Metrics(), Metrics()
    for metrics in (one, other):
        metrics.serve("m", EngineStats)
    one.on_first_token(1.0)
    assert values(other).get("jaxserve_time_to_first_token_seconds_count", 0) == 0
