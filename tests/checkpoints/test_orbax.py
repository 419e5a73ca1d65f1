import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax
from checkpoints.load import load_weights
from checkpoints.resolve import open_source, resolve
from jaxserve.types import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 4}


def sharding(ways, *spec):
    devices = jax.devices()[:ways]
    mesh = jax.make_mesh((ways,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=devices)
    return jax.NamedSharding(mesh, jax.P(*spec))


def abstract(dtype=jnp.float32, ways=1, **shapes):
    shapes = shapes or {"embedding": (8, 4), "layers.0.norm": (4,)}
    placed = sharding(ways, "tensor")
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, shape in shapes.items()
    }


def values(dtype=jnp.float32):
    return {
        "embedding": jnp.arange(32, dtype=dtype).reshape(8, 4),
        "layers.0.norm": jnp.arange(4, dtype=dtype),
    }


@pytest.fixture
def saved(tmp_path):
    orbax.save(tmp_path / "saved", values(), CONFIG, {"eos_token_id": 2})
    return tmp_path / "saved"


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_restore_gives_back_what_was_saved_where_it_is_wanted(tmp_path, dtype, ways):
    orbax.save(tmp_path / "a", values(dtype), CONFIG, {})
    wanted = abstract(dtype, ways)
    restored = orbax.restore(tmp_path / "a", wanted)
    assert list(restored) == list(wanted)
    for name, value in values(dtype).items():
        assert restored[name].dtype == dtype
        assert restored[name].sharding == wanted[name].sharding
        np.testing.assert_array_equal(restored[name], value)


def test_a_sharded_model_is_saved_whole(tmp_path):
    placed = {n: jax.device_put(v, sharding(4, "tensor")) for n, v in values().items()}
    orbax.save(tmp_path / "a", placed, CONFIG, {})
    restored = orbax.restore(tmp_path / "a", abstract(ways=2))
    np.testing.assert_array_equal(restored["embedding"], values()["embedding"])


def test_restore_casts(saved):
    restored = orbax.restore(saved, abstract(jnp.bfloat16))
    assert restored["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["embedding"].astype(jnp.float32), values()["embedding"])


def test_resolve_knows_a_converted_folder(saved):
    files = resolve(str(saved))
    assert (files.kind, files.name) == ("orbax", "saved")
    assert (files.config, files.generation_config) == (CONFIG, {"eos_token_id": 2})
    with pytest.raises(CheckpointError, match="restored, not read by tensor"):
        open_source(files)
    loaded = load_weights(files, abstract(), (), None)
    np.testing.assert_array_equal(loaded["embedding"], values()["embedding"])


def test_a_mismatch_lists_both_sides(saved):
    with pytest.raises(CheckpointError) as error:
        orbax.restore(saved, abstract(embedding=(8, 8), head=(4,)))
    for part in (
        "1 parameters unfilled: head",
        "1 stored parameters unused: layers.0.norm",
        "embedding is (8, 4), needs (8, 8)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "format is None; handled: 1"),
        ('{"format": 2}', "format is 2"),
        ('{"format": 1}', "no parameters"),
        ('{"format": 1, "parameters": {"a": {}}}', "no parameters"),
    ],
)
def test_marker_that_says_nonsense(saved, text, message):
    (saved / "jaxserve.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        orbax.restore(saved, abstract())


def test_missing_parameters_folder(saved):
    (saved / "params").rename(saved / "elsewhere")
    with pytest.raises(CheckpointError, match="no folder params"):
        orbax.restore(saved, abstract())


def data_files(saved):
    return [
        path for path in (saved / "params").rglob("*") if path.is_file() and path.stat().st_size
    ]


def restore_damaged(folder):
    """Deletes and truncates each file in turn; how many of these a restore refused."""
    refused = 0
    for path in data_files(folder):
        whole = path.read_bytes()
        for damage in (lambda p=path: p.unlink(), lambda p=path, w=whole: p.write_bytes(w[:-1])):
            damage()
            try:
                restored = orbax.restore(folder, abstract())
            except CheckpointError:
                refused += 1
            else:
                for name, value in values().items():
                    np.testing.assert_array_equal(restored[name], value)
            path.write_bytes(whole)
    return refused


def run_apart(function, folder) -> int:
    """What a function of this file returns, from a process of its own: a failed restore leaves
    coroutines and callbacks of Orbax behind."""
    script = (
        f"import pathlib, sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"
        f"from test_orbax import {function.__name__} as function\n"
        f"print('returned', function(pathlib.Path({str(folder)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("returned")[-1])


def test_any_missing_or_truncated_file_is_an_error_or_does_not_matter(saved):
    assert run_apart(restore_damaged, saved) >= 2


def restore_another_shape(folder):
    content = json.loads((folder / "jaxserve.json").read_text())
    content["parameters"]["embedding"]["shape"] = [8, 8]
    (folder / "jaxserve.json").write_text(json.dumps(content))
    wanted = abstract(**{"embedding": (8, 8), "layers.0.norm": (4,)})
    with pytest.raises(CheckpointError, match="missing or damaged"):
        orbax.restore(folder, wanted)
    return 0


def test_parameters_saved_under_another_shape_than_stated(saved):
    assert run_apart(restore_another_shape, saved) == 0


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        orbax.save(tmp_path / "file" / "x", values(), CONFIG, {})
