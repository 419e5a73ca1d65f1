"""The load on a server: both transports, both kinds of arrivals, and what is made of the times."""

import argparse
import asyncio
import time

import pytest
from server_fakes import serving

from bench import serve
from bench.serve import Answer


def test_time_per_output_token_leaves_the_first_out():
    assert Answer(5, 11, ttft_s=0.5, e2e_s=1.5).tpot_s == pytest.approx(0.1)
    assert Answer(5, 1, ttft_s=0.5, e2e_s=0.5).tpot_s is None


ANSWERS = [
    Answer(4, 11, ttft_s=0.1, e2e_s=0.6, gaps_s=(0.05,) * 10),  # 50 ms a token
    Answer(4, 11, ttft_s=0.3, e2e_s=0.5, gaps_s=(0.02,) * 10),  # 20 ms
    Answer(4, 1, ttft_s=0.2, e2e_s=0.2),
    Answer(4, 0, error="429"),
]


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "kept"),
    [(None, None, 3), (250, None, 2), (None, 30, 2), (250, 30, 1), (300, 50.001, 3), (50, 30, 0)],
)
def test_goodput_counts_answers_within_both_limits(ttft_ms, tpot_ms, kept):
    assert serve.kept_limits(ANSWERS, ttft_ms, tpot_ms) == kept


def test_summary_leaves_failed_requests_out_of_the_times():
    figures = serve.summary(ANSWERS, 2.0)
    assert (figures["requests"], figures["answered"], figures["errors"]) == (4, 3, 1)
    assert figures["first_errors"] == ["429"]
    assert figures["requests_per_s"] == 1.5
    assert figures["output_tokens_per_s"] == 11.5
    assert figures["time_to_first_token"]["p50_ms"] == 200.0
    assert figures["time_per_output_token"]["p50_ms"] == 35.0
    assert figures["time_between_tokens"]["p50_ms"] == 35.0
    assert figures["end_to_end"]["p50_ms"] == 500.0
    assert serve.summary([ANSWERS[3]], 2.0)["end_to_end"] == {}


async def test_open_loop_sends_when_due_whatever_is_in_flight():
    sent: list[tuple[int, float]] = []
    begin_s = time.perf_counter()

    async def transport(prompt, length):
        sent.append((prompt[0], time.perf_counter() - begin_s))
        await asyncio.sleep(0.5)
        yield None
        yield len(prompt), length

    arrivals = [0.0, 0.05, 0.1]
    answers = await serve.open_loop(transport, [([i], 1) for i in range(3)], arrivals)
    assert [i for i, _ in sent] == [0, 1, 2]
    for (_, at_s), due_s in zip(sent, arrivals, strict=True):
        assert due_s <= at_s < due_s + 0.3
    assert sent[-1][1] < 0.5, "all were sent before the first was answered"
    assert all(answer.ttft_s >= 0.5 for answer in answers)


async def test_closed_loop_has_one_request_a_client_in_flight():
    in_flight, most, total = 0, 0, 0

    async def transport(prompt, length):
        nonlocal in_flight, most, total
        in_flight += 1
        most, total = max(most, in_flight), total + 1
        await asyncio.sleep(0.005)
        in_flight -= 1
        yield None
        yield len(prompt), length

    answers = await serve.closed_loop(transport, [([1, 2], 1)] * 20, 3)
    assert (most, total, len(answers)) == (3, 20, 20)


async def test_an_answer_of_another_length_is_an_error():
    async def transport(prompt, length):
        yield None
        yield len(prompt), length - 1

    answer = await serve.ask(transport, ([1, 2], 5), time.perf_counter())
    assert answer.error == "asked 2 + 5 tokens, got (2, 4)"


def arguments(**changes):
    fields = {
        "requests": 12, "clients": 3, "rate": None, "transport": "http", "shrink": 32,
        "vocab": 258, "ttft_limit_ms": None, "tpot_limit_ms": None,
    }  # fmt: skip
    return argparse.Namespace(**(fields | changes))


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("rate", [None, 200.0])
async def test_a_server_is_measured_over_both_transports(transport, rate):
    options = arguments(transport=transport, rate=rate, ttft_limit_ms=1e4, tpot_limit_ms=1e4)
    async with serving(max_queue=64) as served:
        figures = await serve.run(options, served.url, served.target)
        sent = served.engine.requests[serve.WARM_UP_REQUESTS :]
    expected = [length for _, length in serve.trace_requests(12, 32, 258)]
    assert sorted(request.sampling.max_tokens for request in sent) == sorted(expected)
    assert (figures["answered"], figures["first_errors"]) == (12, [])
    assert figures["output_tokens"] == sum(expected)
    assert ("rate" in figures, "clients" in figures) == (rate is not None, rate is None)
    assert figures["goodput"]["kept_share"] == 1
    assert 0 < figures["time_to_first_token"]["p50_ms"] <= figures["end_to_end"]["p99_ms"]
    assert figures["server_counters"]


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_what_the_server_refuses_is_counted(transport):
    async with serving(info={"max_model_len": 16, "max_request_tokens": 16}) as served:
        options = arguments(transport=transport, requests=3, shrink=2)
        figures = await serve.run(options, served.url, served.target)
    assert (figures["answered"], figures["errors"]) == (0, 3)
    assert figures["time_to_first_token"] == {}
