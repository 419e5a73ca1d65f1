"""Steps that other processes lower are the engine's own, and what fails there is done here."""

import concurrent.futures
import logging
import sys
import threading

import engines
import jax
import psutil
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import MeshConfig
from jaxserve.execution import lowering
from jaxserve.execution.buckets import Buckets
from jaxserve.execution.programs import Program
from jaxserve.memory import kv_cache

PROMPT = [1, 2, 3]


def lowering_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "jaxserve.execution.lowering" in child.cmdline()
    ]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes an engine that keeps nothing; where asked, with processes that lower its steps."""

    def make_engine(num_processes: int, **changes):
        monkeypatch.setattr(lowering, "num_processes", lambda attention: num_processes)
        fields = {"tensor": 2, "max_num_seqs": 1, "max_batched_tokens": 16, "compile_cache": "off"}
        return engines.make(tmp_path / "model", **{**fields, **changes})

    return make_engine


def watch(monkeypatch) -> list[tuple[str, bool]]:
    """Programs as they are lowered, and whether another process did."""
    seen, lower = [], Program.lower

    def note(self, exported=None):
        seen.append((self.name, exported is not None))
        return lower(self, exported)

    monkeypatch.setattr(Program, "lower", note)
    return seen


def test_engine_whose_steps_other_processes_lowered_is_the_same(make, monkeypatch):
    def outcome(num_processes):
        driver = make(num_processes, num_pages=None)
        [tokens] = driver.generate([PROMPT], max_tokens=6)
        assert driver.runner.num_runtime_compiles == 0
        memory = {
            shape: (compiled.memory_analysis().temp_size_in_bytes, compiled.output_shardings)
            for shape, compiled in driver.runner._steps.items()
        }
        return tokens, driver.runner.num_pages, memory

    expected = outcome(0)
    seen = watch(monkeypatch)
    assert outcome(2) == expected
    assert not lowering_processes()
    steps = sorted(by_other for name, by_other in seen if name.startswith("forward"))
    assert steps == [True] * len(expected[2])
    assert not any(by_other for name, by_other in seen if not name.startswith("forward"))


def test_steps_are_lowered_anew_where_the_largest_needs_more_memory(make, monkeypatch):
    options = {"tensor": 1, "num_pages": None}
    runner = make(0, **options).runner
    largest = max(runner._steps, key=lambda shape: (shape.tokens, shape.kind))
    temporary = runner._steps[largest].memory_analysis().temp_size_in_bytes
    usable = runner._weight_bytes + runner._slot_bytes + 4 * temporary  # an eighth is half of it
    monkeypatch.setattr(kv_cache, "usable_bytes", lambda device, fraction: usable)
    expected = make(0, **options)
    seen = watch(monkeypatch)
    driver = make(2, **options)
    assert [by_other for name, by_other in seen if name.startswith("forward")].count(True) > 2
    assert len(driver.runner._steps) == 2
    assert driver.runner.num_pages == expected.runner.num_pages
    assert driver.generate([PROMPT]) == expected.generate([PROMPT])


def test_start_that_finds_its_programs_has_no_processes(make, tmp_path, monkeypatch):
    folder = str(tmp_path / "programs")
    jax.config.update("jax_enable_compilation_cache", False)  # what it brings is not kept
    compilation_cache.reset_cache()
    try:
        first = make(1, compile_cache=folder)
        monkeypatch.setattr(lowering.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
        second = make(1, compile_cache=folder)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
    assert first.info.programs.num_traced == second.info.programs.num_found > 0
    assert second.info.programs.num_traced == 0
    assert first.generate([PROMPT]) == second.generate([PROMPT])


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false", "/bin/cat"])
def test_engine_lowers_what_processes_do_not(make, monkeypatch, caplog, program):
    seen = watch(monkeypatch)
    monkeypatch.setattr(sys, "executable", program)
    with caplog.at_level(logging.WARNING):
        driver = make(2)
    [message] = [m for m in caplog.messages if "lowers steps" in m]
    assert message.startswith("a process that lowers steps failed; the engine does it itself: ")
    assert not any(by_other for _, by_other in seen)
    assert len(driver.generate([PROMPT], max_tokens=6)[0]) == 6


def test_engine_without_the_partitioner_that_exports_need_lowers_its_steps(make, monkeypatch):
    seen = watch(monkeypatch)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        driver = make(1)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert seen
    assert not any(by_other for _, by_other in seen)
    assert len(driver.generate([PROMPT], max_tokens=6)[0]) == 6


def source(**changes) -> lowering.StepSource:
    fields = {
        "config": engines.TINY,
        "mesh": MeshConfig(),
        "platform": "cpu",
        "topology": lowering.describe(jax.devices()),
        "layout": "tensor",
        "dtype": "float32",
        "buckets": Buckets((1,), (16,), 1, 4),
        "page_size": 8,
        "attention": "reference",
        "embeddings": False,
        "settings": lowering.tracing_settings(),
    }
    return lowering.StepSource(**{**fields, **changes})


def test_what_went_wrong_in_a_process_is_told(caplog):
    lowerers = lowering.Lowerers(source(layout="sideways"), 1)
    [shape, _] = source().buckets.steps()
    with caplog.at_level(logging.WARNING):
        assert lowerers.export(shape, 8) is None
        assert lowerers.export(shape, 8) is None
    lowerers.close()
    [message] = caplog.messages
    assert "ConfigError" in message
    assert "sideways" in message


def test_process_has_the_code_and_the_settings_of_its_engine(tmp_path, monkeypatch):
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve" / "__init__.py").write_text("raise ImportError('another jaxserve')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_ENABLE_X64", "true")  # after JAX read it
    lowerers = lowering.Lowerers(source(), 1)
    [shape, _] = source().buckets.steps()
    exported = lowerers.export(shape, 8)
    lowerers.close()
    assert exported is not None
    runner = source().runner()
    runner.num_pages = 8
    program = runner.step_program(shape)
    ours = lowering.Exported(program.export("cpu"), 0.0)
    assert program.lower(exported).as_text() == program.lower(ours).as_text()


def test_closing_ends_those_that_wait(caplog):
    lowerers = lowering.Lowerers(source(), 1)
    [shape, _] = source().buckets.steps()
    with concurrent.futures.ThreadPoolExecutor(2) as threads, caplog.at_level(logging.WARNING):
        waiting = [threads.submit(lowerers.export, shape, 8) for _ in range(2)]
        started = threading.Event()
        while not lowering_processes():
            started.wait(0.01)
        lowerers.close()
        for future in waiting:
            assert isinstance(future.exception(timeout=60), concurrent.futures.CancelledError)
    lowerers.close()
    assert not lowering_processes()
    assert not caplog.messages
    with pytest.raises(concurrent.futures.CancelledError):
        lowerers.export(shape, 8)


def test_process_ends_when_its_engine_has_gone():
    lowerers = lowering.Lowerers(source(), 1)
    [shape, _] = source().buckets.steps()
    assert lowerers.export(shape, 8) is not None
    [process] = lowerers._processes
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    lowerers.close()


def test_processes_are_for_gpu_kernels_and_leave_processors_to_compile(monkeypatch):
    monkeypatch.setattr(lowering.os, "sched_getaffinity", lambda _: set(range(16)))
    assert lowering.num_processes("gpu") == 8
    assert lowering.num_processes("reference") == 0
    monkeypatch.setattr(lowering.os, "sched_getaffinity", lambda _: set(range(2)))
    assert lowering.num_processes("gpu") == 0
