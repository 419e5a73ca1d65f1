"""What an engine tells of its steps, and how often."""

import time

import pytest
from engines import make

from jaxserve import messages
from jaxserve.engine import loop
from jaxserve.engine.recorder import ID_CHARACTERS, STEPS_KEPT, Recorder
from jaxserve.observation import EngineState
from jaxserve.scheduler.sequence import Batch

PROMPT = [5 + i % 90 for i in range(40)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return make(tmp_path_factory.mktemp("recorder") / "model")


@pytest.fixture(autouse=True)
def cold(driver):
    driver.forget()
    driver.finish()
    driver.link.sent.clear()


def look(driver) -> EngineState:
    driver.engine._handle(messages.Inspect())
    [state] = [m.state for m in driver.link.sent if isinstance(m, messages.State)]
    driver.link.sent.clear()
    return state


def test_every_step_is_timed_by_kind(driver):
    before = driver.engine.stats()
    driver.generate([PROMPT, PROMPT[:7]], max_tokens=6)
    after = driver.engine.stats()
    counts = {
        k: after.step_seconds[k].count - before.step_seconds[k].count for k in ("mixed", "decode")
    }
    assert sum(counts.values()) == after.num_steps - before.num_steps
    by_bucket = {
        kind: sum(b.num_steps for b in after.buckets if b.kind == kind)
        - sum(b.num_steps for b in before.buckets if b.kind == kind)
        for kind in counts
    }
    assert counts == by_bucket
    assert counts["decode"] >= 4
    assert after.step_tokens.total - before.step_tokens.total == (
        after.computed_tokens - before.computed_tokens
    )
    assert all(after.step_seconds[k].total > before.step_seconds[k].total for k in counts)


def test_times_of_a_step_and_the_gap_before_it(monkeypatch):
    now_s = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    recorder, batch = Recorder(), Batch([], 0, 3, [], [])
    # sent at 9, awaited at 9.5, read at 10; the next was sent at 9.2 already, awaited at 10.1
    recorder.record(batch, 9.0, 9.5)
    now_s = 10.5
    recorder.record(batch, 9.2, 10.1)
    recorder.pause()
    now_s = 20.0
    recorder.record(batch, 19.0, 19.1)
    assert recorder.step_seconds["decode"].total == pytest.approx(1.0 + 0.5 + 1.0)
    assert recorder.host_gap_seconds.count == 1
    assert recorder.host_gap_seconds.total == pytest.approx(0.1)
    assert recorder.step_tokens.total == 9


def test_counters_are_told_now_and_then_and_when_all_is_done(driver, monkeypatch):
    monkeypatch.setattr(loop, "STATS_INTERVAL_S", 1000.0)
    driver.generate([PROMPT], max_tokens=2)
    driver.submit(PROMPT[:9], max_tokens=30)
    while driver.scheduler.has_work or driver.engine._pending is not None:
        driver.step()
    told = [m for m in driver.link.sent if isinstance(m, messages.Outputs)]
    assert sum(m.stats is not None for m in told) <= 3
    assert len(told) >= 30
    assert told[-1].stats == driver.engine.stats()
    assert told[-1].stats.num_running == 0


def test_admissions_are_told_once_with_the_time_waited(driver):
    names = [driver.submit(PROMPT[i:], max_tokens=3) for i in range(6)]  # of which 4 fit at once
    driver.engine.step()
    while driver.scheduler.has_work or driver.engine._pending is not None:
        driver.step()
    told = [one for m in driver.link.sent if isinstance(m, messages.Outputs) for one in m.admitted]
    assert [name for name, _ in told] == names
    waited = [seconds for _, seconds in told]
    assert min(waited) >= 0
    assert waited[5] > waited[0]


def test_a_look_shows_who_runs_and_waits(driver):
    names = ["short", *(f"{i}-{'x' * 40}" for i in range(5))]
    for name in names:
        driver.submit(PROMPT, request_id=name, max_tokens=20)
    driver.step()
    driver.step()
    state = look(driver)
    assert [s.status for s in state.sequences].count("waiting") >= 2
    first = state.sequences[0]
    assert (first.status, first.num_prompt, first.max_tokens) == ("running", 40, 20)
    assert first.num_pages == -(-first.num_computed // 8)
    shown = ["sh", *(name[:ID_CHARACTERS] for name in names[1:])]
    assert [s.request_id for s in state.sequences] == shown, "too little of each to end it"
    driver.finish()
    assert look(driver).sequences == []


def test_a_look_shows_the_latest_steps_in_order(driver):
    driver.generate([PROMPT], max_tokens=20)
    state = look(driver)
    assert 0 < len(state.steps) <= STEPS_KEPT
    for before, after in zip(state.steps, state.steps[1:], strict=False):
        assert before.end_s <= after.end_s <= state.now_s
        assert after.begin_s >= before.end_s, "the device runs one step at a time"
    assert all(0 < s.num_tokens <= s.room and s.begin_s <= s.end_s for s in state.steps)


def test_a_look_shows_prefixes_by_hits(driver):
    for _ in range(3):
        driver.generate([PROMPT], max_tokens=1)
    driver.generate([PROMPT[:16] + [9] * 9], max_tokens=1)
    nodes = look(driver).prefix_nodes
    pages = {node.page: node for node in nodes}
    path = [node for node in nodes if node.token_ids in (PROMPT[:8], PROMPT[8:16])]
    assert [node.hits for node in path] == [3, 3]
    assert path[0].above == 0
    assert path[1].above == path[0].page
    assert all(node.above == 0 or pages[node.above].hits >= node.hits for node in nodes)
