"""Compiled programs kept on disk: what is found is what would have been compiled, and nothing
else."""

import contextlib
import functools
import gc
import logging
import os
import threading
import time

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, MeshConfig, compiler_environment
from jaxserve.engine.start import program_folder
from jaxserve.execution import programs
from jaxserve.execution.programs import Program, Programs
from jaxserve.types import ConfigError
from sharding.mesh import make_mesh

DEVICES = jax.devices()[:2]
MESH = make_mesh(MeshConfig(tensor=2), DEVICES)
WHOLE, SPLIT = NamedSharding(MESH, PartitionSpec()), NamedSharding(MESH, PartitionSpec("tensor"))


@pytest.fixture(autouse=True)
def no_jax_cache():
    """What JAX's own cache brings is not kept."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def product(x, pages, *, factor=2.0):
    return {"sum": factor * x.sum(), "x": x}, pages.at[:4, 0].set(x[:, 0])


def make(function=product, **changes) -> Program:
    fields = {
        "name": "product",
        "function": function,
        "arguments": (
            jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=WHOLE),
            jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=SPLIT),
        ),
        "traits": (2.0,),
        "donate": (1,),
        "out_shardings": (WHOLE, SPLIT),
    }
    return Program(**{**fields, **changes})


def get(folder, program, **settings):
    """The compiled program, and where it came from."""
    kept = Programs(DEVICES, folder, **settings)
    with kept.open():
        compiled = kept.get(program)
    counts = kept.counts
    assert counts.num_found + counts.num_traced == 1
    if counts.num_found:
        return compiled, "found"
    return compiled, "compiled" if counts.num_compiled else "traced"


def origin(folder, program, **settings) -> str:
    return get(folder, program, **settings)[1]


def square(x, pages):
    return x.sum(), pages + x[0, 0]


@pytest.fixture
def folder(tmp_path):
    return programs.make_private(tmp_path / "programs")


def test_found_programs_do_what_compiled_ones_do(folder):
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    y = np.arange(32, dtype=np.float32).reshape(8, 4)
    for expected in ("compiled", "found", "found"):
        compiled, came_from = get(folder, make())
        assert came_from == expected
        pages = jax.device_put(y, SPLIT) + 0  # not numpy's own memory, which is never written
        pointers = [shard.data.unsafe_buffer_pointer() for shard in pages.addressable_shards]
        result, out = compiled(jax.device_put(x, WHOLE), pages)
        np.testing.assert_array_equal(result["sum"], 2 * x.sum())
        np.testing.assert_array_equal(result["x"], x)
        want = y.copy()
        want[:4, 0] = x[:, 0]
        assert out.shape == y.shape
        # donated and written in place, split as before
        assert pages.is_deleted()
        assert out.sharding == SPLIT
        assert [s.data.unsafe_buffer_pointer() for s in out.addressable_shards] == pointers
        assert compiled.memory_analysis().alias_size_in_bytes == y.nbytes // 2
        # numpy arrays go in as device arrays do
        again, _ = compiled(x, jax.device_put(y, SPLIT))
        np.testing.assert_array_equal(again["sum"], result["sum"])


def test_what_decides_a_program_decides_which_is_found(folder, monkeypatch):
    assert origin(folder, make()) == "compiled"
    wide = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=WHOLE)
    whole = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=WHOLE)
    others = [
        make(square, arguments=(wide, make().arguments[1])),
        make(square, arguments=(make().arguments[0], whole), donate=()),
        make(functools.partial(product, factor=3.0), traits=(3.0,)),
        make(name="other"),
        make(donate=()),
        make(out_shardings=(WHOLE, WHOLE), donate=()),
        make(precision="highest"),
        make(options={"xla_cpu_enable_fast_math": True}),
    ]
    for program in others:
        assert origin(folder, program) == "compiled"
        assert origin(folder, program) == "found"
    assert origin(folder, make(), environment={"XLA_FLAGS": "--one"}) == "compiled"
    monkeypatch.setattr(programs, "_hardware", lambda devices: ("another processor",))
    assert origin(folder, make()) == "compiled"
    monkeypatch.undo()
    monkeypatch.setattr(programs, "_software", lambda: ("another jax",))
    assert origin(folder, make()) == "compiled"
    monkeypatch.undo()
    assert origin(folder, make()) == "found"


def test_changed_code_is_traced_and_what_it_lowers_to_is_found(folder, monkeypatch):
    assert origin(folder, make()) == "compiled"
    monkeypatch.setattr(programs, "_code", lambda: "changed")
    assert origin(folder, make()) == "traced"
    assert origin(folder, make()) == "found"
    monkeypatch.setattr(programs, "_code", lambda: "changed again")
    assert origin(folder, make(functools.partial(product, factor=5.0))) == "compiled"


def test_code_hash_follows_the_files(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("1")
    monkeypatch.setattr(programs, "ROOT", tmp_path)
    monkeypatch.setattr(programs, "TRACED", (".",))
    before = programs._code()
    (tmp_path / "b.py").write_text("2")
    assert programs._code() != before
    (tmp_path / "b.py").write_text("1")
    assert programs._code() == before
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert programs._code() != before


def test_which_arguments_are_used_decides_too(folder, monkeypatch):
    def of_first(x, y):
        return x + 1

    def of_second(x, y):
        return y + 1

    monkeypatch.setattr(programs, "_code", lambda: "before")
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=WHOLE)
    changes = {"arguments": (x, x), "donate": (), "out_shardings": WHOLE}
    assert origin(folder, make(of_first, **changes)) == "compiled"
    monkeypatch.setattr(programs, "_code", lambda: "after")
    compiled, _ = get(folder, make(of_second, **changes))
    assert compiled(np.zeros(4, np.float32), np.ones(4, np.float32)).tolist() == [2] * 4


def test_programs_do_not_outlive_their_users(folder):
    def num_live():
        gc.collect()
        return len(DEVICES[0].client.live_executables())

    before = num_live()
    for program in (make(), make(), make(name="other")):
        compiled = get(folder, program)
        assert num_live() == before + 1
        del compiled
        assert num_live() == before


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        flip,
        lambda data: data.replace(b"program 1", b"program 0", 1),
    ],
)
def test_damaged_program_is_told_and_made_anew(folder, damage, caplog):
    assert origin(folder, make()) == "compiled"
    [path] = folder.glob("*.program")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert origin(folder, make()) == "compiled"
    [record] = caplog.records
    assert record.getMessage() == f"{path} can't be used, and is made anew: it is damaged"
    assert origin(folder, make()) == "found"


def test_program_that_does_not_load_is_made_anew(folder, monkeypatch, caplog):
    assert origin(folder, make()) == "compiled"

    def refuse(*args, **kwargs):
        raise RuntimeError("made for another driver")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(programs.serialize_executable, "deserialize_and_load", refuse)
        assert origin(folder, make()) == "compiled"
    assert "made for another driver" in caplog.text
    assert origin(folder, make()) == "found"


def test_folder_that_cannot_be_written_only_costs_time(folder, monkeypatch, caplog):
    def refuse(*args):
        raise PermissionError("Read-only file system")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "replace", refuse)
        kept = Programs(DEVICES, folder)
        with kept.open():
            for name in "ab":
                kept.get(make(square, name=name))
    assert caplog.messages == ["compiled steps are not kept: Read-only file system"]
    assert list(folder.iterdir()) == []
    # what is there is read all the same
    assert origin(folder, make()) == "compiled"
    monkeypatch.setattr(os, "utime", refuse)
    assert origin(folder, make()) == "found"


def test_program_that_cannot_be_serialised_is_used(folder, monkeypatch, caplog):
    def refuse(compiled):
        raise NotImplementedError("with const_args")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(programs.serialize_executable, "serialize", refuse)
        compiled, came_from = get(folder, make())
    assert came_from == "compiled"
    assert caplog.messages == ["compiled steps are not kept: with const_args"]
    x, pages = np.ones((4, 8), np.float32), jax.device_put(np.ones((8, 4), np.float32), SPLIT)
    assert compiled(x, pages)[0]["sum"] == 64
    assert list(folder.iterdir()) == []


def test_what_jax_kept_is_not_kept_again(folder, monkeypatch):
    lowered = jax.stages.Lowered.compile

    def hit(self, **options):
        jax.monitoring.record_event(programs.JAX_CACHE_HIT)
        return lowered(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", hit)
        assert origin(folder, make()) == "compiled"
    assert list(folder.iterdir()) == []
    assert origin(folder, make()) == "compiled"
    assert len(list(folder.iterdir())) == 2


def test_slots_go_to_the_lowest_rank_and_then_to_who_came_first():
    slots, order = programs.Slots(2), []

    def work(name, rank):
        with slots.take(rank):
            order.append(name)

    with contextlib.ExitStack() as both:
        both.enter_context(slots.take(1))
        with slots.take(1):
            threads = []
            for name, rank in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
                threads.append(threading.Thread(target=work, args=(name, rank)))
                threads[-1].start()
                while len(slots._waiting) < len(threads):
                    time.sleep(0.001)
            assert order == []
        for thread in threads:  # one slot is free
            thread.join(10)
    assert order == ["b", "d", "a", "c"]


def test_least_recently_used_programs_make_room(folder):
    variants = [make(square, name=name) for name in "abc"]
    for program in variants:
        assert origin(folder, program) == "compiled"
    for age, path in enumerate(sorted(folder.glob("*.program"), key=lambda p: p.stat().st_mtime)):
        os.utime(path, (age, age))
    assert origin(folder, variants[0]) == "found"  # and so the newest
    (folder / "half.new").write_bytes(b"")
    os.utime(folder / "half.new", (0, 0))
    (folder / "being-written.new").write_bytes(b"")
    size = max(path.stat().st_size for path in folder.glob("*.program"))
    programs.prune(folder, 2 * size)
    assert len(list(folder.glob("*.program"))) == len(list(folder.glob("*.key"))) == 2
    assert [path.name for path in folder.glob("*.new")] == ["being-written.new"]
    assert [origin(folder, p) for p in variants] == ["found", "compiled", "found"]


def test_folder_is_its_owners_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    assert programs.make_private(folder).stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)
    with pytest.raises(PermissionError, match="other than its owner"):
        programs.make_private(folder)
    with pytest.raises(ConfigError, match=r"compile_cache is .*other than its owner"):
        program_folder(EngineConfig(compile_cache=str(folder)))
    assert program_folder(EngineConfig(compile_cache="off")) is None


def test_folder_is_beside_what_jax_keeps(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "ours"))
    before = jax.config.jax_compilation_cache_dir
    try:
        for beside, parent in ((str(tmp_path), tmp_path), ("gs://away", tmp_path / "ours")):
            jax.config.update("jax_compilation_cache_dir", beside)
            assert program_folder(EngineConfig()) == parent / "programs"
        (tmp_path / "ours" / "programs").chmod(0o777)
        with caplog.at_level(logging.WARNING):
            assert program_folder(EngineConfig()) is None
        assert "compiled steps are not kept" in caplog.text
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_environment_is_what_changes_compilation(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("MOSAIC_GPU_LINE_INFO", "1")
    monkeypatch.setenv("UNRELATED", "1")
    found = compiler_environment()
    assert found["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert found["MOSAIC_GPU_LINE_INFO"] == "1"
    assert "UNRELATED" not in found


def test_second_start_traces_nothing_and_is_the_same(tmp_path, monkeypatch):
    def start():
        driver = engines.make(
            tmp_path / "model",
            tensor=2,
            max_num_seqs=1,
            max_batched_tokens=16,
            num_pages=None,
        )
        tokens = driver.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        tokens += driver.generate([[1, 2, 3]], max_tokens=4, temperature=1, repetition_penalty=1.2)
        runner = driver.engine._runner
        assert runner.num_runtime_compiles == 0
        temporary = {
            shape: compiled.memory_analysis().temp_size_in_bytes
            for shape, compiled in runner._steps.items()
        }
        return tokens, runner.num_pages, temporary, runner.programs.counts

    # where an earlier run of the tests kept its programs, these are found already
    *first, counts = start()
    num_programs = counts.num_found + counts.num_traced
    monkeypatch.setattr(Program, "lower", lambda self, _: pytest.fail(f"{self.name} is traced"))
    *second, counts = start()
    assert (counts.num_found, counts.num_traced) == (num_programs, 0)
    assert second == first
