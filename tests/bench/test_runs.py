"""Each bench that starts an engine, as its command runs it, on a tiny model with few requests."""

import sys
import time
import types

import pytest
import select_cases

from bench import record, trace
from bench.lang import count_tokens
from bench.metrics_cost import Switch, generate_s
from jaxserve import AsyncLLM, Runtime, function, gen, messages
from jaxserve.engine import loop
from jaxserve.engine.recorder import Recorder

LIMITS = ("--max-num-seqs=4", "--max-batched-tokens=32", "--num-pages=128", "--page-size=8")


def test_throughput(run_bench, tiny_model):
    result = run_bench("throughput", tiny_model, *LIMITS, "--requests=6", "--shrink=16")
    figures = result["figures"]
    load = [(len(p) // 16 or 1, n // 16 or 1) for p, n in trace.make_trace(6, 0, 101)]
    assert figures["input_tokens"] == sum(prompt for prompt, _ in load)
    assert figures["output_tokens"] == sum(length for _, length in load)
    total_per_s = (figures["input_tokens"] + figures["output_tokens"]) / figures["wall_s"]
    assert figures["total_tokens_per_s"] == pytest.approx(total_per_s, rel=0.05)
    padding = figures["padding"]
    # every prompt token and every generated one but the last of each request
    assert padding["all"]["tokens"] == sum(prompt + length - 1 for prompt, length in load)
    assert 0 < padding["all"]["padding_share"] < 1
    assert set(padding["by kind"]) == {"decode", "mixed"}
    steps = sum(found["steps"] for found in padding["by shape"].values())
    assert steps == padding["all"]["steps"]


def test_prefix(run_bench, tiny_model):
    result = run_bench(
        "prefix", tiny_model, *LIMITS, "--conversations=2", "--turns=2", "--system-len=24",
        "--message-len=6", "--tasks=1", "--questions=3", "--shots-len=24", "--question-len=6",
        "--answer-len=3",
    )  # fmt: skip
    for load, requests in (("multi-turn", 4), ("few-shot", 3)):
        found = result["figures"][load]
        on, off = found["cache on"], found["cache off"]
        assert on["requests"] == off["requests"] == requests
        assert on["prompt_tokens"] == off["prompt_tokens"] == off["computed_prompt_tokens"]
        assert off["hit_rate"] == 0
        cached = on["prompt_tokens"] - on["computed_prompt_tokens"]
        assert on["hit_rate"] == round(cached / on["prompt_tokens"], 4)
        assert cached >= 24  # the system prompt or the examples, three pages, once at the least
        assert found["speedup"] == pytest.approx(off["wall_s"] / on["wall_s"], rel=0.01)


def test_stall(run_bench, tiny_model):
    result = run_bench(
        "stall", tiny_model, *LIMITS, "--streams=2", "--long-len=120", "--long-prompts=2"
    )
    figures = result["figures"]
    assert figures["chunked"]["max_batched_tokens"] == 32
    assert figures["whole"]["max_batched_tokens"] == 122
    for name in ("chunked", "whole"):
        gaps = figures[name]["gaps"]
        assert 0 < gaps["p50_ms"] <= gaps["p99_ms"] <= gaps["longest_ms"]
    assert figures["longest gap, chunked over whole"] > 0


def test_what_stall_could_not_show_is_refused(run_bench, tiny_model, capsys):
    with pytest.raises(SystemExit):
        run_bench("stall", tiny_model, *LIMITS, "--streams=2", "--long-len=32")
    assert "nothing is chunked" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_bench("stall", tiny_model, *LIMITS, "--streams=4", "--long-len=64")
    assert "wait for them" in capsys.readouterr().err


def test_latency(run_bench, tiny_model):
    result = run_bench(
        "latency", tiny_model, *LIMITS, "--batches=1,4", "--prefill=2x40", "--input-len=16",
        "--short=2", "--long=34", "--repeats=1",
    )  # fmt: skip
    decode = result["figures"]["decode"]
    assert set(decode) == {"batch 1", "batch 4"}
    for found in decode.values():
        assert found["floor_ms"] >= 0
        assert "share_of_floor" in found
    # three more sequences: embedding rows of 32 floats; 34 tokens of KV, 2 layers x 8 heads of 4
    more = decode["batch 4"]["step_bytes"] - decode["batch 1"]["step_bytes"]
    assert more == 3 * (32 * 4 + 34 * 2 * 8 * 4 * 4)
    assert result["figures"]["prefill"]["2x40"]["ms"] > 0


def test_serve(run_bench, tiny_model):
    limits = " ".join(LIMITS)
    result = run_bench(
        "serve", tiny_model, "--requests=6", "--shrink=16", "--vocab=101", "--rate=100",
        "--transport=grpc", f"--serve-flags={limits}",
    )  # fmt: skip
    assert result["device"] == record.cpu_name()
    figures = result["figures"]
    assert (figures["answered"], figures["server_exit_code"]) == (6, 0)
    assert figures["time_per_output_token"]["p99_ms"] > 0


def test_start(run_bench, tiny_model):
    limits = ("--max-num-seqs=1", "--max-batched-tokens=16", "--num-pages=64", "--page-size=8")
    figures = run_bench("start", tiny_model, *limits, "--warm-starts=1")["figures"]
    cold, warm = figures["cold"], figures["warm 1"]
    num_programs = cold["programs"]["num_compiled"]
    assert (cold["programs"]["num_found"], cold["programs"]["num_traced"]) == (0, num_programs)
    assert (warm["programs"]["num_found"], warm["programs"]["num_traced"]) == (num_programs, 0)
    assert figures["kept"]["files"] == num_programs
    assert warm["programs_s"] < cold["programs_s"] < cold["engine_s"] < cold["ready_s"]


def test_dispatch(run_bench):
    limits = ("--max-num-seqs=1", "--max-batched-tokens=16", "--num-pages=64", "--page-size=8")
    figures = run_bench("dispatch", *limits, "--tiny-layers=2", "--repeats=2")["figures"]
    assert set(figures) == {"decode 1 tokens x 1 sequences", "mixed 16 tokens x 1 sequences"}
    for found in figures.values():
        # six weights and a cache a layer, three beside the layers, the last tokens and the buffer
        assert found.pop("arrays") == 2 * 7 + 3 + 2
        assert all(spread["repeats"] == 2 and spread["min_ms"] > 0 for spread in found.values())


def test_metrics_cost(run_bench, tiny_model):
    result = run_bench(
        "metrics_cost", tiny_model, *LIMITS, "--batch=4", "--tokens=6", "--repeats=2"
    )
    figures = result["figures"]
    assert len(figures["cost, by pair"]) == 2
    for on, off, cost in zip(
        figures["tokens_per_s on"], figures["tokens_per_s off"], figures["cost, by pair"],
        strict=True,
    ):  # fmt: skip
        assert cost == pytest.approx(1 - on / off, abs=1e-3)
    assert all(part > 0 for part in figures["parts_us"].values())


async def test_metrics_are_off_when_turned_off_and_on_again_at_once(tiny_model, monkeypatch):
    told: list[int] = []
    stats = loop.Engine.stats
    monkeypatch.setattr(loop.Engine, "stats", lambda self: told.append(1) or stats(self))
    monkeypatch.setattr(loop, "STATS_INTERVAL_S", 0.0)
    limits = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 128, "page_size": 8}
    found = []
    own = Recorder.record, loop.Engine.step
    with Switch() as switch:
        async with AsyncLLM(str(tiny_model), process="thread", observer=switch, **limits) as llm:
            switch.metrics.serve("tiny", llm.stats, llm.info)
            for on in (True, False, False, True, True):
                switch.turn(on)
                told.clear()
                before = llm.stats()
                await generate_s(llm, [[1, 2, 3]] * 4, 12)
                after = llm.stats()
                timed = after.step_tokens.count - before.step_tokens.count
                assert timed == (after.num_steps - before.num_steps if on else 0)
                found.append(len(told) > 6)
            observed = switch.metrics.registry.get_sample_value(
                "jaxserve_request_generation_tokens_sum", {"model_name": "tiny"}
            )
    assert found == [True, False, False, True, True]
    assert observed == 3 * 4 * 12
    assert (Recorder.record, loop.Engine.step) == own


def test_lang_counts_what_came_after_a_stop_string_where_it_belongs(tmp_path, monkeypatch):
    @function
    def stopping(s):
        s += "It is" + gen(stop_regex=".", ignore_eos=True, max_tokens=60)

    handle = loop.Engine._handle

    def handle_late(engine, message):
        if isinstance(message, messages.Abort):
            time.sleep(0.1)
        handle(engine, message)

    monkeypatch.setattr(loop.Engine, "_handle", handle_late)
    example = types.SimpleNamespace(stopping=stopping, ITEMS=[{}])
    monkeypatch.setitem(sys.modules, "examples.stopping", example)
    model = select_cases.write(tmp_path / "tiny")
    limits = {"max_num_seqs": 8, "max_batched_tokens": 64, "num_pages": 600, "page_size": 8}
    with Runtime(str(model), **limits) as runtime:
        found = [count_tokens(runtime, "stopping") for _ in range(2)]
        end = runtime.stats()
        assert sum(one["generated_tokens"] for one in found) == end.generated_tokens
        assert (end.num_running, end.num_waiting) == (0, 0)
        time.sleep(0.3)
        assert runtime.stats() == end


def test_lang(run_bench, tmp_path):
    model = select_cases.write(tmp_path / "tiny")
    result = run_bench(
        "lang", model, "--max-num-seqs=8", "--max-batched-tokens=64", "--num-pages=600",
        "--page-size=8", "--examples=json_output", "--programs=6", "--answer-len=4", "--repeats=1",
        "--process=thread",
    )  # fmt: skip
    batch = result["figures"]["batch"]
    for name in ("run_batch", "plain batch", "one at a time"):
        assert batch[name]["tokens_per_s"] == pytest.approx(
            6 * 4 / (batch[name]["median_ms"] / 1e3), rel=0.01
        )
    assert batch["one at a time"]["steps"] > 2 * batch["plain batch"]["steps"]
    assert batch["run_batch"]["steps"] < batch["one at a time"]["steps"]
    tokens = result["figures"]["tokens"]["json_output"]
    on, off = (tokens[cache]["computed_tokens"] for cache in ("cache on", "cache off"))
    assert tokens["times_fewer"] == round(off / on, 2)


def test_lang_refuses_what_it_does_not_know(run_bench, tiny_model, capsys):
    for option in ("--parts=tokens,other", "--examples=chat,other", "--no-prefix-cache"):
        with pytest.raises(SystemExit):
            run_bench("lang", tiny_model, option)
    assert "other: known are" in capsys.readouterr().err
