import json
import logging
import pathlib
import subprocess
import sys

import pytest
from tiny_checkpoints import gguf_tensors, llama_tensors, write_gguf

from checkpoints.catalogue import models_dir
from checkpoints.resolve import open_source, resolve
from jaxserve.types import CheckpointError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))


def test_resolve_takes_a_gguf_file(gguf_path):
    files = resolve(str(gguf_path))
    assert (files.kind, files.path, files.name) == ("gguf", gguf_path, "tiny")
    assert files.config["num_hidden_layers"] == 2
    assert files.has_weights


def test_resolve_takes_a_folder_in_hugging_face_format(folder):
    files = resolve(str(folder))
    assert (files.kind, files.path, files.name) == ("safetensors", folder, "tiny")
    assert files.config["model_type"] == "llama"
    assert files.generation_config == {"eos_token_id": [2, 0]}
    assert len(open_source(files).names()) == len(llama_tensors())


def test_resolve_takes_the_name_of_a_pulled_model():
    (models_dir() / "my-model").mkdir(parents=True)
    path = write_gguf(models_dir() / "my-model" / "Whatever.gguf", gguf_tensors(llama_tensors()))
    files = resolve("my-model")
    assert (files.kind, files.path, files.name) == ("gguf", path, "my-model")


def test_unknown_model_is_told_what_there_is():
    (models_dir() / "my-model").mkdir(parents=True)
    with pytest.raises(CheckpointError) as error:
        resolve("no-such-model")
    for part in ("no-such-model", "my-model", "smollm2-135m-instruct", "jaxserve pull"):
        assert part in str(error.value)


def test_known_model_that_is_not_here_is_told_how_to_fetch_it():
    with pytest.raises(CheckpointError, match="jaxserve pull smollm2-135m-instruct"):
        resolve("smollm2-135m-instruct")


@pytest.mark.parametrize(
    "model",
    ["", "..", "../models/x", "a/b", "x\0y", "~nobody-here/x", "é" * 300, "name" * 300, "/no/such"],
)
def test_a_text_that_is_no_name_and_no_path_is_an_unknown_model(model):
    with pytest.raises(CheckpointError):
        resolve(model)


def test_folder_with_a_config_only_has_no_weights(folder):
    (folder / "model.safetensors").unlink()
    files = resolve(str(folder))
    assert not files.has_weights
    with pytest.raises(CheckpointError, match="no weights"):
        open_source(files)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04K*.")
    with pytest.raises(CheckpointError, match=rf"{name}: is a pickle"):
        resolve(str(folder))
    with pytest.raises(CheckpointError, match="is a pickle"):
        resolve(str(folder / name))


def test_pickles_beside_safetensors_are_not_looked_at(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04K*.")
    assert resolve(str(folder)).has_weights


def test_code_that_a_config_names_is_ignored_and_that_is_said(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    with caplog.at_level(logging.WARNING):
        files = resolve(str(folder))
    assert "auto_map" not in files.config
    assert "auto_map" in caplog.text
    assert "nothing in a checkpoint is executed" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_config_that_is_no_config(folder, text, message):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=message):
        resolve(str(folder))


def test_folder_that_holds_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf file"):
        resolve(str(tmp_path))


def test_folder_with_several_gguf_files_wants_one_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, gguf_tensors(llama_tensors()))
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_shards_without_their_index(sharded_folder):
    (sharded_folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*index\.json"):
        resolve(str(sharded_folder))


def test_safetensors_file_wants_its_folder(folder):
    with pytest.raises(CheckpointError, match="name the folder"):
        resolve(str(folder / "model.safetensors"))


def test_resolving_imports_no_jax(folder, gguf_path):
    code = (
        "import sys; from checkpoints.resolve import open_source, resolve\n"
        "import checkpoints.gguf, jaxserve.entry.pull\n"
        f"for path in {[str(folder), str(gguf_path)]!r}:\n"
        "    source = open_source(resolve(path)); source.read('model.norm.weight'); "
        "source.close()\n"
        "assert not {'jax', 'jaxlib', 'torch', 'pickle5'} & sys.modules.keys()"
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
