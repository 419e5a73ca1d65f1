"""What benches make of their measurements: percentiles, padding, the floor, comparisons, plots."""

import importlib
import json
import math
import sys

import pytest
from server_fakes import fake_info

from bench import compare, engines, latency, record
from jaxserve.config import EngineConfig, MeshConfig
from jaxserve.models.config import ModelConfig
from jaxserve.types import BucketStats, EngineStats


def test_percentiles_are_interpolated():
    seconds = [i / 1000 for i in range(101, 0, -1)]  # 1 to 101 ms
    assert record.percentiles(seconds) == {"p50_ms": 51.0, "p90_ms": 91.0, "p99_ms": 100.0}
    assert record.percentiles([0.002, 0.004])["p50_ms"] == 3.0
    assert record.percentiles([0.005]) == {"p50_ms": 5.0, "p90_ms": 5.0, "p99_ms": 5.0}


def test_results_of_one_day_are_all_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    paths = [record.store("latency", "Some Chip", {"run": run}) for run in range(3)]
    assert [json.loads(path.read_text())["figures"]["run"] for path in paths] == [0, 1, 2]
    assert len(set(paths)) == 3
    assert {path.parent.name for path in paths} == {"some-chip"}


def test_engine_settings_are_flags_of_every_bench_that_starts_one(capsys):
    parser = engines.engine_parser("doc", prefix_cache=False, max_num_seqs=16)
    plain = engines.engine_config(parser.parse_args([]))
    assert plain == EngineConfig(prefix_cache=False, max_num_seqs=16)
    given = ["m", "--prefix-cache", "--tensor=2", "--load-format=dummy", "--memory-fraction=0.5"]
    assert engines.engine_config(parser.parse_args(given)) == EngineConfig(
        "m", load_format="dummy", max_num_seqs=16, memory_fraction=0.5, mesh=MeshConfig(tensor=2)
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--load-format=other"])
    with pytest.raises(AssertionError, match="colour"):
        engines.engine_parser("doc", colour=1)


def test_padding_is_of_the_steps_between_two_readings():
    before = EngineStats(buckets=(BucketStats("decode", 4, 10, 40), BucketStats("mixed", 8, 1, 8)))
    after = EngineStats(
        buckets=(
            BucketStats("mixed", 64, 1, 33),
            BucketStats("decode", 4, 12, 46),
            BucketStats("decode", 2, 1, 1),
            BucketStats("mixed", 8, 1, 8),
        )
    )
    assert engines.padding(before, after) == {
        "all": {"steps": 4, "tokens": 40, "padding_share": round(34 / 74, 4)},
        "by kind": {
            "decode": {"steps": 3, "tokens": 7, "padding_share": 0.3},
            "mixed": {"steps": 1, "tokens": 33, "padding_share": round(31 / 64, 4)},
        },
        "by shape": {
            "decode 2": {"steps": 1, "tokens": 1, "padding_share": 0.5},
            "decode 4": {"steps": 2, "tokens": 6, "padding_share": 0.25},
            "mixed 64": {"steps": 1, "tokens": 33, "padding_share": round(31 / 64, 4)},
        },
    }
    assert engines.padding(after, after)["all"]["padding_share"] == 0


LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_an_8b_models_step_reads_its_weights_and_each_sequences_cache():
    token_bytes = 32 * 2 * 8 * 128 * 2  # layers, K and V, heads, width, bfloat16
    info = fake_info(
        vocab_size=128256, weight_bytes=2 * 8_030_261_248, dtype="bfloat16",
        num_pages=999, page_size=16, kv_bytes=1000 * 16 * token_bytes,
    )  # fmt: skip
    model = ModelConfig.from_hf(LLAMA_8B)
    one = latency.step_bytes(info, model, 1, 0)
    assert one == pytest.approx(15.0e9, rel=0.001)
    more = latency.step_bytes(info, model, 64, 1000)
    assert more - one == pytest.approx(64 * 1000 * token_bytes + 63 * 4096 * 2)
    tied = ModelConfig.from_hf({**LLAMA_8B, "tie_word_embeddings": True})
    assert latency.step_bytes(info, tied, 1, 0) == info.weight_bytes


def test_layers_with_a_window_read_no_more_than_it():
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 100}
    model = ModelConfig.from_hf(config)
    info = fake_info(weight_bytes=0, vocab_size=0, num_pages=9, page_size=10, kv_bytes=700)
    read = latency.step_bytes(info, model, 2, 1000) - 2 * 4096 * 4
    assert read == pytest.approx(2 * 100 * 7)


def test_the_floor_is_bytes_over_the_rate_of_all_devices():
    decode = {"batch 1": {"ms_per_step": 4.0, "step_bytes": 8e9}}
    latency.add_floor(decode, 2e12, 2)
    assert decode["batch 1"]["floor_ms"] == 2.0
    assert decode["batch 1"]["share_of_floor"] == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode / batch 8 / ms_per_step", "lower"),
        ("batch 1 / busy_us_per_step", "lower"),
        ("time_to_first_token / p99_ms", "lower"),
        ("chunked / gaps / longest_ms", "lower"),
        ("256 sequences, greedy / schedule_us", "lower"),
        ("start / compile_s", "lower"),
        ("prefill / 8x2048 / ms", "lower"),
        ("cases / llama / gpu / temporaries_bytes", "lower"),
        ("padding / all / padding_share", "lower"),
        ("errors", "lower"),
        ("output_tokens_per_s", "higher"),
        ("goodput / requests_per_s", "higher"),
        ("goodput / kept_share", "higher"),
        ("cases / llama / gpu / bytes_rate_GB_s", "higher"),
        ("cases / llama / gpu / TFLOP_s", "higher"),
        ("cases / llama / gpu / share_of_copy_rate", "higher"),
        ("decode / batch 8 / share_of_floor", "higher"),
        ("measured_peak / bytes_s", "higher"),
        ("copy_rate_GB_s", "higher"),
        ("multi-turn / cache on / hit_rate", "higher"),
        ("few-shot / speedup", "higher"),
        ("few-shot / cache on / max_hit_rate", None),
        ("goodput / ttft_limit_ms", None),
        ("requests", None),
        ("start / num_pages", None),
        ("shape / rows", None),
    ],
)
def test_which_way_a_figure_improves_follows_from_its_unit(name, expected):
    assert compare.better(name) == expected


def test_changes_are_of_figures_that_both_have():
    before = {"a": {"p50_ms": 10.0, "requests_per_s": 5.0}, "all_ms": [1, 2], "gone": 1, "ok": True}
    after = {"a": {"requests_per_s": 4.0, "p50_ms": 12.0}, "all_ms": [3], "new": 1, "ok": False}
    first, second = compare.changes(before, after)
    assert (first.name, first.ratio, first.worsening) == ("a / p50_ms", 1.2, 1.2)
    assert (second.name, second.ratio, second.worsening) == ("a / requests_per_s", 0.8, 1.25)
    [errors] = compare.changes({"errors": 0}, {"errors": 2})
    assert errors.worsening == math.inf
    [none] = compare.changes({"errors": 0}, {"errors": 0})
    assert none.worsening == 1.0
    [stopped] = compare.changes({"requests_per_s": 3}, {"requests_per_s": 0})
    assert stopped.worsening == math.inf
    [count] = compare.changes({"requests": 3}, {"requests": 9})
    assert (count.ratio, count.worsening) == (3.0, None)


def result(figures, bench="latency", device="chip"):
    return {
        "bench": bench, "device": device, "date": "2026-11-30T04:49:09+00:00", "commit": "abc",
        "command": f"python -m bench.{bench}", "figures": figures,
    }  # fmt: skip


def test_compare_exits_with_1_where_something_got_worse_than_allowed(monkeypatch, tmp_path, capsys):
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    a.write_text(json.dumps(result({"ms_per_step": 4.0, "tokens_per_s": 100.0})))
    b.write_text(json.dumps(result({"ms_per_step": 4.3, "tokens_per_s": 120.0})))
    c.write_text(json.dumps(result({}, bench="serve")))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.compare", *map(str, arguments)])
        compare.main()
        return capsys.readouterr().out

    shown = run(a, b)
    assert "1.075" in shown
    assert "1.200" in shown
    run(a, b, "--worst", "1.08")
    with pytest.raises(SystemExit, match="1 figures are worse") as caught:
        run(a, b, "--worst", "1.05")
    assert isinstance(caught.value.code, str)  # which exits with 1
    run(b, a, "--worst", "1.21")
    with pytest.raises(SystemExit):
        run(b, a, "--worst", "1.19")
    with pytest.raises(SystemExit) as caught:
        run(a, c)
    assert caught.value.code == 2


def test_each_benchs_results_become_one_picture(monkeypatch, tmp_path, capsys):
    from bench import plot

    decode = {f"batch {b}": {"ms_per_step": 4.0 + b / 64, "floor_ms": 3.5} for b in (1, 8, 64)}
    percentiles = {"p50_ms": 10.0, "p90_ms": 20.0, "p99_ms": 40.0}
    cases = {"llama": {"shape": {}, "gpu": {"share_of_copy_rate": 0.9}, "tpu": {"unsupported": ""}}}
    results = {
        "one": result({"decode": decode}),
        "two": result({"decode": decode}, device="other"),
        "three": result({name: percentiles for name in plot.LATENCIES}, bench="serve"),
        "four": result({"cases": cases}, bench="kernels"),
    }
    for name, one in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    paths = [str(tmp_path / f"{name}.json") for name in results]
    monkeypatch.setattr(sys, "argv", ["bench.plot", *paths, "--out", str(tmp_path)])
    plot.main()
    for name in ("latency", "serve", "kernels"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_plot_says_how_to_install_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "bench.plot", raising=False)
    with pytest.raises(SystemExit, match=r"pip install -e '.\[bench\]'"):
        importlib.import_module("bench.plot")


def test_bars_stand_where_their_group_is():
    from matplotlib.figure import Figure

    from bench import plot

    axes = Figure().subplots()
    plot.bars(axes, ["p50", "p90"], ["a", "b"], [[1, 2], [3, 4]])
    found = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    assert found == [
        (pytest.approx(x), height) for x, height in ((-0.2, 1), (0.8, 2), (0.2, 3), (1.2, 4))
    ]
