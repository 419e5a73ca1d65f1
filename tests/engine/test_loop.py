"""The engine's loop: stops, limits, aborts, shutdown, logprobs, and no compiling at run time."""

import jax
import numpy as np
import pytest
from engines import TINY, Driver, make

from jaxserve import messages
from jaxserve.types import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    return make(tmp_path_factory.mktemp("tiny"))


def test_max_tokens_ends_with_length(driver):
    id = driver.submit([3, 4, 5], max_tokens=7)
    result = driver.finish()[id]
    assert (len(result.token_ids), result.finish_reason) == (7, "length")


def test_stop_token_ends_with_stop_and_is_part_of_the_tokens(driver):
    [tokens] = driver.generate([[3, 4, 5]], max_tokens=12)
    stop = tokens[6]
    first = tokens.index(stop)
    id = driver.submit([3, 4, 5], stop_token_ids=(stop,))
    result = driver.finish()[id]
    assert (result.token_ids, result.finish_reason) == (tokens[: first + 1], "stop")


def test_min_tokens_keeps_stop_tokens_from_being_sampled(driver):
    [tokens] = driver.generate([[3, 4, 5]], max_tokens=12)
    stops = tuple(set(tokens[:4]))
    id = driver.submit([3, 4, 5], stop_token_ids=stops, min_tokens=9, max_tokens=12)
    result = driver.finish()[id]
    assert len(result.token_ids) >= 9
    assert not set(result.token_ids[:9]) & set(stops)


def test_logprobs_are_those_of_the_tokens(driver):
    id = driver.submit([9, 8, 7], logprobs=5, max_tokens=6)
    plain = driver.submit([9, 8, 7], max_tokens=6)
    results = driver.finish()
    result = results[id]
    assert result.token_ids == results[plain].token_ids
    assert len(result.logprobs) == 6
    for token, logprobs in zip(result.token_ids, result.logprobs, strict=True):
        assert logprobs.top_ids[0] == token  # greedy
        assert logprobs.top_logprobs[0] == logprobs.logprob
        assert len(logprobs.top_ids) == 5
        assert logprobs.top_logprobs == sorted(logprobs.top_logprobs, reverse=True)
    assert results[plain].logprobs == []


def test_abort_gives_every_page_back(driver):
    driver.forget()
    free = driver.scheduler.pool.num_free
    ids = [driver.submit(list(range(3, 60)), cache_salt=str(i)) for i in range(12)]
    for _ in range(5):
        driver.step()
    driver.engine._handle(messages.Abort(ids))
    results = driver.finish()
    assert {results[id].finish_reason for id in ids} == {"abort"}
    driver.forget()
    assert driver.scheduler.pool.num_free == free


def test_aborting_an_unknown_request_is_nothing(driver):
    driver.engine._handle(messages.Abort(["nobody"]))
    assert driver.finish() == {}


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody(tmp_path):
    small = make(tmp_path, num_pages=6)
    too_long = small.submit(list(range(3, 40)), max_tokens=20)
    fits = small.submit([3, 4, 5])
    results = small.finish()
    assert results[too_long].finish_reason == "error"
    assert results[too_long].error.startswith("is 20, with the prompt's 37 tokens 57")
    assert results[too_long].invalid_field == "max_tokens"
    assert results[fits].finish_reason == "length"


def test_shutdown_lets_requests_finish_within_their_grace(driver, tmp_path):
    engine = make(tmp_path)
    id = engine.submit([3, 4, 5], max_tokens=20)
    engine.link.inbox.append(messages.Shutdown(grace_s=60))
    engine.engine.run()
    assert isinstance(engine.link.sent[-1], messages.Stopped)
    result = engine.results()[id]
    assert (len(result.token_ids), result.finish_reason) == (20, "length")


def test_shutdown_without_grace_tells_those_still_running(tmp_path):
    engine = make(tmp_path)
    ids = [engine.submit([3, 4, 5 + i], max_tokens=200) for i in range(10)]
    engine.step()
    engine.step()
    engine.link.inbox.append(messages.Shutdown(grace_s=0))
    engine.engine.run()
    assert isinstance(engine.link.sent[-1], messages.Stopped)
    results = engine.results()
    assert {results[id].finish_reason for id in ids} == {"error"}
    assert "shutting down" in results[ids[0]].error
    engine.scheduler.check()


def test_nothing_compiles_at_run_time(driver):
    compiled = []

    def listen(event: str, duration: float, **kwargs) -> None:
        if "compile" in event:
            compiled.append(event)

    rng = np.random.default_rng(0)
    before = driver.engine.stats().num_runtime_compiles  # by tests that started other engines
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for count in (1, 2, 3, 4, 7):
            for size in (1, 7, 33, 90):
                for i in range(count):
                    kind = i % 4
                    driver.submit(
                        rng.integers(3, 100, size).tolist(),
                        max_tokens=3,
                        temperature=float(kind > 0),
                        top_k=5 if kind > 1 else 0,
                        logprobs=3 if kind > 2 else None,
                    )
                driver.finish(check=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert driver.engine.stats().num_runtime_compiles == before


def test_steps_are_counted_by_bucket(tmp_path):
    engine = make(tmp_path)
    engine.submit(list(range(3, 23)), max_tokens=4)
    engine.submit(list(range(30, 42)), max_tokens=4)
    engine.submit(list(range(50, 67)), max_tokens=1)
    engine.finish()
    stats = engine.engine.stats()
    found = {(b.kind, b.size): (b.num_steps, b.num_tokens, b.num_padding) for b in stats.buckets}
    # 20 + 12 tokens fill a step of 32; 2 + 17 take the next; then two steps of two
    assert found == {("mixed", 32): (2, 51, 13), ("decode", 2): (2, 4, 0)}
    assert stats.num_steps == 4
    assert stats.computed_tokens == 55


def test_a_compilation_at_run_time_is_counted(tmp_path):
    engine = make(tmp_path)
    jax.jit(lambda x: x * 3 + engine.info.startup_s)(np.ones(7))
    assert engine.engine.stats().num_runtime_compiles >= 1
    engine.runner.close()


def test_pages_that_fit_are_computed_when_not_set(tmp_path):
    engine = make(tmp_path, num_pages=None)
    pages_per_sequence = TINY["max_position_embeddings"] // engine.info.page_size
    assert engine.info.num_pages == 4 * pages_per_sequence  # all that there's any use for
    assert engine.info.kv_bytes == (engine.info.num_pages + 1) * engine.runner.page_bytes


def test_a_mesh_that_does_not_divide_the_heads_names_sizes_that_do(tmp_path):
    with pytest.raises(ConfigError, match=r"1, 3"):
        make(
            tmp_path,
            tensor=2,
            config_changes={
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 8,
                "intermediate_size": 60,
            },
        )


def test_weights_that_are_missing_are_an_error_before_anything_serves(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        make(tmp_path, config_changes={"weights": False})


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(ConfigError, match="16 devices"):
        make(tmp_path, tensor=16)
