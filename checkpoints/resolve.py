"""From what a user calls a model to the files that are it.

Imports no jax; reads headers and configs, no weights.
"""

import dataclasses
import logging
import os
import pathlib
import re
from typing import Any, Literal

from checkpoints import gguf
from checkpoints.catalogue import CATALOGUE, models_dir, pulled_models
from checkpoints.files import listed, read_json
from checkpoints.gguf_file import read_gguf
from checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsSource
from checkpoints.source import TensorSource
from jaxserve.types import CheckpointError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
CONVERTED_NAME = "jaxserve.json"
"""Marks a folder that `jaxserve convert` wrote, and lists its parameters."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model found on this machine."""

    kind: Literal["gguf", "safetensors", "orbax"]
    path: pathlib.Path
    """The .gguf file, else the folder."""
    name: str
    """What to call it: the name it was pulled under, else the file's or folder's name."""
    config: dict[str, Any]
    """In the form of Hugging Face's config.json; for GGUF made from the file's metadata."""
    generation_config: dict[str, Any]
    """In the form of generation_config.json; empty if there is none."""
    has_weights: bool = True
    """False: a folder with a config only, which is enough for load_format dummy."""


def resolve(model: str) -> ModelFiles:
    """Finds a model by path (.gguf file, Hugging Face folder, converted folder) or by the name it
    was pulled under.

    Raises: CheckpointError that says what is wrong with the files, or which models there are and
    how to pull one; UnsupportedModel for a GGUF architecture or key that nothing handles.
    """
    if os.path.exists(
        os.path.expanduser(model)
    ):  # unlike pathlib's, false for any text that can't be a path
        path = pathlib.Path(os.path.expanduser(model))
        return _at(path, path.resolve().stem if path.is_file() else path.resolve().name)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", model):
        if (folder := models_dir() / model).is_dir():
            return _at(folder, model)
        if model in CATALOGUE:
            raise CheckpointError(
                f"model {model!r} is not on this machine yet; fetch it with: jaxserve pull {model}"
            )
    pulled = pulled_models()
    raise CheckpointError(
        f"no model {model!r}: not a file or folder here, not a pulled model"
        f" ({'pulled: ' + listed(pulled) if pulled else 'none is pulled'}), not one that can "
        "be pulled"
        f" ({listed(CATALOGUE)}; fetch one with: jaxserve pull NAME)"
    )


def open_source(files: ModelFiles) -> TensorSource:
    """The tensors of a gguf or safetensors model.

    Raises CheckpointError for missing, truncated or damaged files.
    """
    if not files.has_weights:
        raise CheckpointError(
            f"{files.path}: has a {CONFIG_NAME} but no weights ({SINGLE_NAME} or {INDEX_NAME})"
        )
    if files.kind == "gguf":
        return gguf.GgufSource(files.path)
    if files.kind == "safetensors":
        return SafetensorsSource(files.path)
    raise CheckpointError(
        f"{files.path}: is a converted checkpoint, whose parameters are restored, not read by "
        "tensor"
    )


def _at(path: pathlib.Path, name: str) -> ModelFiles:
    if not path.is_dir():
        return _file(path, name)
    if (path / CONFIG_NAME).is_file():
        return _folder(path, name)
    files = sorted(entry for entry in path.iterdir() if entry.suffix == ".gguf")
    # Of a split file the first part stands for all.
    starts = [entry for entry in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", entry.stem)]
    if len(starts) == 1:
        return _file(starts[0], name)
    if starts:
        raise CheckpointError(
            f"{path}: holds {len(starts)} .gguf files; name one of them: "
            f"{listed(entry.name for entry in starts)}"
        )
    raise CheckpointError(f"{path}: is no model folder: it has no {CONFIG_NAME} and no .gguf file")


def _file(path: pathlib.Path, name: str) -> ModelFiles:
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(_no_pickle(path))
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: name the folder ({path.parent}), whose {CONFIG_NAME} says what the "
            "tensors are"
        )
    file = read_gguf(path)
    config, generation = gguf.hf_config(path, file), gguf.hf_generation_config(file.metadata)
    return ModelFiles("gguf", path, name, config, generation)


def _folder(path: pathlib.Path, name: str) -> ModelFiles:
    config = read_json(path / CONFIG_NAME)
    if "auto_map" in config:
        logger.warning(
            "%s: ignores auto_map, which names code to run: nothing in a checkpoint is executed",
            path / CONFIG_NAME,
        )
        config = {key: value for key, value in config.items() if key != "auto_map"}
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path / CONFIG_NAME}: has no model_type")
    generation_path = path / GENERATION_CONFIG_NAME
    generation = read_json(generation_path) if generation_path.is_file() else {}
    if (path / CONVERTED_NAME).is_file():
        return ModelFiles("orbax", path, name, config, generation)
    if any((path / file).is_file() for file in (INDEX_NAME, SINGLE_NAME)):
        return ModelFiles("safetensors", path, name, config, generation)
    _refuse_other_weights(path)
    return ModelFiles("safetensors", path, name, config, generation, has_weights=False)


def _refuse_other_weights(path: pathlib.Path) -> None:
    """A folder without safetensors under the names that count may hold none at all, but not
    others.
    """
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if shards := [name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]:
        raise CheckpointError(
            f"{path}: holds {listed(shards)}, but not {INDEX_NAME}, which says what is in them"
        )
    if pickles := [
        name for name in names if name.endswith(PICKLE_SUFFIXES) and name != "training_args.bin"
    ]:
        raise CheckpointError(_no_pickle(path / pickles[0]))


def _no_pickle(path: pathlib.Path) -> str:
    return (
        f"{path}: is a pickle, and loading one runs whatever code it holds; jaxserve loads "
        "safetensors, GGUF and its"
        " own converted folders"
    )
