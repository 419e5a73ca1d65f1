import json
import pathlib
import subprocess
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import gguf_tensors, llama_tensors, write_folder, write_gguf

from checkpoints.load import load_params, load_weights
from checkpoints.resolve import resolve
from checkpoints.rules import Rule
from checkpoints.source import TensorSpec
from jaxserve.config import MeshConfig
from jaxserve.models import registry
from jaxserve.types import CheckpointError
from sharding.mesh import make_mesh


def first(tensors, config):
    return tensors[0]


def stack(tensors, config):
    return np.concatenate(tensors)


CONFIG = types.SimpleNamespace(num_layers=2, biased=False)
RULES = (
    Rule("embedding", ("embed",), first),
    Rule("layers.{i}.pair", ("h.{i}.left", "h.{i}.right"), stack),
    Rule("layers.{i}.bias", ("h.{i}.bias",), first, when=lambda config: config.biased),
)
TENSORS = {
    "embed": np.arange(12, dtype=np.float32).reshape(4, 3),
    "h.0.left": np.full((2, 3), 1, np.float32),
    "h.0.right": np.full((2, 3), 2, np.float32),
    "h.1.left": np.full((2, 3), 3, np.float32),
    "h.1.right": np.full((2, 3), 4, np.float32),
}


class Source:
    """Tensors in memory. Counts reads, and how many of the arrays that it gave out are alive."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.reads = []
        self.given = []
        self.most_alive = 0

    def names(self):
        return {name: TensorSpec(t.shape, t.dtype) for name, t in self.tensors.items()}

    def read(self, name):
        self.reads.append(name)
        array = self.tensors[name].copy()
        self.given.append(weakref.ref(array))
        self.most_alive = max(self.most_alive, sum(r() is not None for r in self.given))
        return array

    def close(self):
        pass


def sharding(spec=()):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=devices)
    return jax.NamedSharding(mesh, jax.P(*spec))


def params_for(shapes=None, dtype=jnp.float32, spec=()):
    shapes = shapes or {"embedding": (4, 3), "layers.0.pair": (4, 3), "layers.1.pair": (4, 3)}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(spec))
        for name, shape in shapes.items()
    }


def test_each_tensor_is_read_once_and_each_parameter_filled():
    source = Source(TENSORS)
    loaded = load_params(source, RULES, params_for(), CONFIG)
    assert list(loaded) == ["embedding", "layers.0.pair", "layers.1.pair"]
    assert sorted(source.reads) == sorted(TENSORS)
    np.testing.assert_array_equal(loaded["embedding"], TENSORS["embed"])
    np.testing.assert_array_equal(loaded["layers.1.pair"][:, 0], [3, 3, 4, 4])


def test_only_one_rules_tensors_are_held_at_a_time():
    source = Source(TENSORS)
    rules = [*RULES[1:], Rule("embedding", ("embed",), lambda tensors, config: tensors[0] + 0)]
    load_params(source, rules, params_for(), CONFIG)
    assert source.most_alive == 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_cast_to_the_parameters_dtype(dtype, stored):
    source = Source({name: t.astype(stored) for name, t in TENSORS.items()})
    loaded = load_params(source, RULES, params_for(dtype=dtype), CONFIG)
    assert loaded["embedding"].dtype == dtype
    np.testing.assert_array_equal(loaded["embedding"].astype(jnp.float32), TENSORS["embed"])


def test_each_device_gets_its_part():
    loaded = load_params(Source(TENSORS), RULES, params_for(spec=("tensor",)), CONFIG)
    assert loaded["embedding"].sharding == sharding(("tensor",))
    parts = [np.asarray(shard.data) for shard in loaded["embedding"].addressable_shards]
    np.testing.assert_array_equal(np.concatenate(parts), TENSORS["embed"])
    assert parts[0].shape == (2, 3)


def test_a_transposed_result_is_laid_out_anew():
    rules = [*RULES[1:], Rule("embedding", ("embed",), lambda tensors, config: tensors[0].T)]
    params = params_for() | params_for({"embedding": (3, 4)})
    loaded = load_params(Source(TENSORS), rules, params, CONFIG)
    np.testing.assert_array_equal(loaded["embedding"], TENSORS["embed"].T)


def test_progress_counts_bytes_up_to_the_total():
    calls = []
    load_params(
        Source(TENSORS),
        RULES,
        params_for(),
        CONFIG,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(48, 144), (96, 144), (144, 144)]


def test_a_mismatch_lists_both_sides_and_reads_nothing():
    tensors = dict(TENSORS)
    tensors["h.7.left"] = tensors.pop("h.1.left")
    source = Source(tensors)
    with pytest.raises(CheckpointError) as error:
        load_params(source, RULES, params_for(), CONFIG)
    assert "1 parameters unfilled: layers.1.pair (lacks h.1.left)" in str(error.value)
    assert "1 tensors unused: h.7.left float32[2,3]" in str(error.value)
    assert source.reads == []


def test_ignored_tensors_need_no_rule():
    source = Source(TENSORS | {"h.0.rotary.inv_freq": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match="inv_freq"):
        load_params(source, RULES, params_for(), CONFIG, ignored=["inv_freq"])
    load_params(source, RULES, params_for(), CONFIG, ignored=[r".*\.inv_freq"])
    assert "h.0.rotary.inv_freq" not in source.reads


def test_parameters_that_no_rule_fills_and_rules_without_a_parameter():
    with pytest.raises(CheckpointError) as error:
        load_params(Source(TENSORS), RULES, params_for({"embedding": (4, 3), "head": (1,)}), CONFIG)
    assert "1 parameters no rule fills: head" in str(error.value)
    assert "2 rules for parameters that the model does not have: layers.0.pair" in str(error.value)


def test_a_rule_that_does_not_apply_uses_no_tensor():
    biased = types.SimpleNamespace(num_layers=2, biased=True)
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias \(lacks h\.0\.bias\)"):
        load_params(Source(TENSORS), RULES, params_for(), biased)


def test_a_tensor_may_serve_two_rules_only_if_one_says_so():
    params = params_for() | params_for({"head": (4, 3)})
    with pytest.raises(CheckpointError, match="embed is used for both embedding and head"):
        load_params(Source(TENSORS), [*RULES, Rule("head", ("embed",), first)], params, CONFIG)
    shared = Rule("head", ("embed",), first, shared=True)
    for rules in ([*RULES, shared], [shared, *RULES]):
        loaded = load_params(Source(TENSORS), rules, params, CONFIG)
        np.testing.assert_array_equal(loaded["head"], loaded["embedding"])


def test_two_rules_for_one_parameter():
    rules = [*RULES, Rule("embedding", ("other",), first)]
    source = Source(TENSORS | {"other": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="two rules make parameter embedding"):
        load_params(source, rules, params_for(), CONFIG)


def test_wrong_shape_names_the_tensors_and_both_shapes():
    source = Source(TENSORS | {"h.1.left": np.ones((3, 3), np.float32)})
    with pytest.raises(CheckpointError) as error:
        load_params(source, RULES, params_for(), CONFIG)
    for part in ("layers.1.pair", "(4, 3)", "h.1.left float32[3,3]", "make (5, 3)"):
        assert part in str(error.value)


def test_a_combination_that_fails_names_the_tensors():
    source = Source(TENSORS | {"h.0.right": np.ones((2, 5), np.float32)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.pair .*h\.0\.right float32\[2,5\]"):
        load_params(source, RULES, params_for(), CONFIG)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_, ml_dtypes.float8_e4m3fn])
def test_dtypes_that_need_scales_are_refused(dtype):
    source = Source(TENSORS | {"embed": np.ones((4, 3), dtype)})
    with pytest.raises(CheckpointError, match=rf"embed is {np.dtype(dtype).name}"):
        load_params(source, RULES, params_for(), CONFIG)
    assert source.reads == []


# ---- with a real family


def build(files, tensor=1, dtype=jnp.float32):
    mesh = make_mesh(MeshConfig(tensor=tensor), jax.devices())
    return registry.build(files.config, mesh, "tensor", dtype)


def load(files, tensor=1, dtype=jnp.float32):
    model = build(files, tensor, dtype)
    return load_weights(files, model.abstract, model.rules, model.config, model.ignored)


def test_every_format_loads_the_same_parameters(tmp_path, folder, sharded_folder, gguf_path):
    loaded = [load(resolve(str(path))) for path in (folder, sharded_folder, gguf_path)]
    for name, value in loaded[0].items():
        np.testing.assert_array_equal(loaded[1][name], value)
        np.testing.assert_array_equal(loaded[2][name], value)


@pytest.mark.parametrize("tensor", [2, 4])
def test_sharded_parameters_are_where_the_model_wants_them(folder, tensor):
    files = resolve(str(folder))
    model = build(files, tensor)
    loaded = load(files, tensor)
    for name, spec in model.abstract.items():
        assert loaded[name].sharding == spec.sharding
        assert loaded[name].shape == spec.shape


def test_a_checkpoint_with_a_missing_layer_and_an_extra_one(tmp_path):
    tensors = llama_tensors()
    renamed = {name.replace("layers.1.", "layers.2."): value for name, value in tensors.items()}
    files = resolve(str(write_folder(tmp_path / "gap", renamed)))
    with pytest.raises(CheckpointError) as error:
        load(files)
    assert "parameters unfilled: layers.1." in str(error.value)
    assert "9 tensors unused: model.layers.2." in str(error.value)


def test_an_untied_head_that_is_missing(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(resolve(str(folder)))


def test_a_gguf_tensor_of_the_wrong_shape(tmp_path):
    tensors = gguf_tensors(llama_tensors()) | {"blk.1.ffn_up.weight": np.ones((95, 64), np.float32)}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_up .*up_proj.*\[95,64\]"):
        load(resolve(str(write_gguf(tmp_path / "a.gguf", tensors))))


MEASURE = """
import resource, sys
import jax, numpy as np
from checkpoints.load import load_params
from checkpoints.rules import Rule
from checkpoints.safetensors import SafetensorsSource
import pathlib, types
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
source = SafetensorsSource(pathlib.Path(sys.argv[1]))
rules = [Rule("w{i}", ("w{i}",), lambda tensors, config: tensors[0].T)]
placed = jax.sharding.SingleDeviceSharding(jax.devices()[0])
spec = jax.ShapeDtypeStruct((2048, 1024), np.float32, sharding=placed)
params = {f"w{i}": spec for i in range(16)}
jax.device_put(np.ones((2048, 1024), np.float32).T, placed).block_until_ready()
before = peak()
loaded = load_params(source, rules, params, types.SimpleNamespace(num_layers=16))
print(peak() - before, sum(array.nbytes for array in loaded.values()))
"""


def test_the_host_never_holds_two_copies(tmp_path):
    import safetensors.numpy

    tensors = {f"w{i}": np.full((1024, 2048), i, np.float32) for i in range(16)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parents[2],
    )
    grown, weights = map(int, result.stdout.split())
    assert weights == 128 << 20
    # a tensor of 8 MiB, its transpose, and what the allocator keeps; a second copy would be 128
    assert grown < weights + (48 << 20)
