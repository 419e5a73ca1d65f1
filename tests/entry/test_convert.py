import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_checkpoints import (
    LLAMA,
    TOKENIZER,
    gguf_tensors,
    llama_tensors,
    write_folder,
    write_gguf,
)

from checkpoints.load import load_weights
from checkpoints.resolve import resolve
from jaxserve.config import MeshConfig
from jaxserve.entry.convert import convert
from jaxserve.entry.text_model import load_tokenizer
from jaxserve.models import registry
from jaxserve.types import CheckpointError
from sharding.mesh import make_mesh


def load(model, tensor=1):
    files = resolve(str(model))
    mesh = make_mesh(MeshConfig(tensor=tensor), jax.devices())
    built = registry.build(files.config, mesh, "tensor", jnp.float32)
    return load_weights(files, built.abstract, built.rules, built.config, built.ignored)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def byte_level_tokens():
    """A vocabulary that can spell anything: GPT-2's 256 letters, and the special tokens."""
    from jaxserve.entry.tokenizer import _byte_of_character

    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *_byte_of_character(),
        "he",
        "ll",
        "hell",
    ]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "llama.vocab_size": len(tokens),
    }


@pytest.fixture
def gguf_model(tmp_path):
    vocabulary = byte_level_tokens()
    tensors = gguf_tensors(llama_tensors())
    num_tokens = len(vocabulary["tokenizer.ggml.tokens"])
    tensors["token_embd.weight"] = np.random.default_rng(1).standard_normal(
        (num_tokens, 64), np.float32
    )
    return write_gguf(tmp_path / "tiny.gguf", tensors, LLAMA | TOKENIZER | vocabulary)


def test_a_gguf_file_converts_to_a_folder_that_loads_without_it(gguf_model, tmp_path):
    before = load(gguf_model)
    text = "hello, ünï <|im_end|>"
    old = load_tokenizer(resolve(str(gguf_model)))
    expected_ids = old.encode(text)
    out = convert(str(gguf_model), tmp_path / "out", progress=False)
    gguf_model.unlink()
    assert_same(load(out), before)
    files = resolve(str(out))
    assert files.kind == "orbax"
    assert files.generation_config == {"eos_token_id": 2, "bos_token_id": 1}
    new = load_tokenizer(files)
    assert new.encode(text) == expected_ids
    assert new.decode(expected_ids, skip_special_tokens=False) == text
    assert new.chat_template.source == "{{ messages }}"
    assert new.eos_token_ids == old.eos_token_ids


def test_a_hugging_face_folder_keeps_its_tokenizer_files(tmp_path):
    folder = write_folder(tmp_path / "tiny", llama_tensors(), num_shards=2)
    (folder / "tokenizer.json").write_text('{"as": "it is"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    before = load(folder)
    out = convert(str(folder), tmp_path / "out", progress=False)
    shutil.rmtree(folder)
    assert_same(load(out), before)
    assert (out / "tokenizer.json").read_text() == '{"as": "it is"}'
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (out / "modeling.py").exists()
    assert resolve(str(out)).generation_config == {"eos_token_id": [2, 0]}


def test_a_converted_folder_loads_sharded(gguf_model, tmp_path):
    out = convert(str(gguf_model), tmp_path / "out", progress=False)
    one, two = load(gguf_model), load(out, tensor=2)
    assert two["layers.0.mlp.down"].sharding.num_devices == 2
    assert_same(one, two)


def test_a_mesh_that_lays_parameters_out_differently_is_told_to_use_the_original(
    gguf_model, tmp_path
):
    out = convert(str(gguf_model), tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match=r"repeated kv heads .* need the original"):
        load(out, tensor=4)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (np.float32, "auto", "float32"),
        (np.float16, "auto", "float16"),
        (np.float64, "auto", "float32"),
        (np.float32, "bfloat16", "bfloat16"),
    ],
)
def test_dtype_of_the_stored_parameters(tmp_path, stored, asked, expected):
    tensors = {name: value.astype(stored) for name, value in llama_tensors().items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    folder = write_folder(tmp_path / "tiny", tensors)
    out = convert(str(folder), tmp_path / "out", asked, progress=False)
    stated = json.loads((out / "jaxserve.json").read_text())["parameters"]
    assert {entry["dtype"] for entry in stated.values()} == {expected}
    assert json.loads((out / "config.json").read_text())["dtype"] == expected


def test_an_existing_folder_is_left_alone(tmp_path):
    folder = write_folder(tmp_path / "tiny", llama_tensors())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        convert(str(folder), tmp_path / "out", progress=False)
    (tmp_path / "out" / "mine").unlink()
    assert resolve(str(convert(str(folder), tmp_path / "out", progress=False))).kind == "orbax"


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    tensors = llama_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((95, 64), np.float32)
    folder = write_folder(tmp_path / "tiny", tensors)
    with pytest.raises(CheckpointError, match="up_proj"):
        convert(str(folder), tmp_path / "out", progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_converted_folder_is_not_converted_again(tmp_path):
    folder = write_folder(tmp_path / "tiny", llama_tensors())
    out = convert(str(folder), tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="converted folder already"):
        convert(str(out), tmp_path / "again", progress=False)


def test_an_unwritable_place(tmp_path):
    folder = write_folder(tmp_path / "tiny", llama_tensors())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        convert(str(folder), tmp_path / "file" / "out", progress=False)


def test_integers_are_refused_before_anything_is_written(tmp_path):
    folder = write_folder(tmp_path / "tiny", {})
    tensors = {name: value.astype(np.int8) for name, value in llama_tensors().items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is int8"):
        convert(str(folder), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
