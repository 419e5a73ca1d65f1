"""Folders that `jaxserve convert` writes: parameters as the model holds them, in Orbax's format.

FOLDER/jaxserve.json             this format's version; name, shape and dtype of each parameter
       config.json, generation_config.json, tokenizer files: Hugging Face's forms
       params/                   an Orbax checkpoint of {name: array}
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from checkpoints.files import listed, read_json
from checkpoints.resolve import CONFIG_NAME, CONVERTED_NAME, GENERATION_CONFIG_NAME
from jaxserve.types import CheckpointError

FORMAT = 1
PARAMS_NAME = "params"
CHUNK_BYTES = 16 << 20
"""Stored piece of an array: a device that holds a part reads the pieces that touch it."""


def save(
    path: pathlib.Path,
    params: Mapping[str, jax.Array],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> None:
    """Writes parameters and configs into the folder `path`, which has no parameters yet.

    Raises: CheckpointError if the folder can't be written.
    """
    stated = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name}
        for name, array in params.items()
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _checkpointer(params) as checkpointer:
            chunks = dict.fromkeys(params, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
            checkpointer.save((path / PARAMS_NAME).absolute(), dict(params), save_args=chunks)
            checkpointer.wait_until_finished()
        _write_json(path / CONFIG_NAME, config)
        if generation_config:
            _write_json(path / GENERATION_CONFIG_NAME, generation_config)
        _write_json(path / CONVERTED_NAME, {"format": FORMAT, "parameters": stated})
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error}") from error


def restore(path: pathlib.Path, params: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The parameters of a converted folder, cast to the dtypes of `params`; each device reads the
    part it holds.

    Raises: CheckpointError if the folder is not whole, or its parameters are not those of `params`,
    listing both sides.
    """
    _compare(path, params)
    folder = path / PARAMS_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{path}: has {CONVERTED_NAME}, but no folder {PARAMS_NAME}")
    try:
        with _checkpointer(params) as checkpointer:
            restored = checkpointer.restore(folder.absolute(), dict(params))
    except (
        ValueError,
        OSError,
        KeyError,
    ) as error:  # TensorStore reports damaged data as ValueError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{folder}: can't be restored; files are missing or damaged: {reason[0][:500]}"
        ) from error
    return {name: restored[name] for name in params}


def _checkpointer(
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
) -> ocp.StandardCheckpointer:
    """With at most two of the largest parameter (or 1 GB) on their way at a time, beside the
    parameters themselves.
    """
    largest = max((array.size * array.dtype.itemsize for array in params.values()), default=0)
    concurrent_gb = math.ceil(2 * largest / 1e9) or 1
    return ocp.StandardCheckpointer(
        save_concurrent_gb=concurrent_gb, restore_concurrent_gb=concurrent_gb
    )


def _compare(path: pathlib.Path, params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    marker = path / CONVERTED_NAME
    content = read_json(marker)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{marker}: format is {content.get('format')!r}; handled: {FORMAT}")
    try:
        shapes = {name: tuple(entry["shape"]) for name, entry in content["parameters"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker}: has no parameters with their shapes") from error
    faults = []
    if lacking := [name for name in params if name not in shapes]:
        faults.append(f"{len(lacking)} parameters unfilled: {listed(lacking)}")
    if unused := [name for name in shapes if name not in params]:
        faults.append(f"{len(unused)} stored parameters unused: {listed(unused)}")
    differ = [
        f"{name} is {shapes[name]}, needs {tuple(spec.shape)}"
        for name, spec in params.items()
        if name in shapes and shapes[name] != tuple(spec.shape)
    ]
    if differ:
        faults.append(
            f"{len(differ)} of other shape (they are kept as they were stored; repeated kv heads "
            "or a padded vocabulary, for another mesh, need the original checkpoint): "
            f"{listed(differ)}"
        )
    if faults:
        raise CheckpointError(f"{path}: the checkpoint does not fit the model: {'; '.join(faults)}")


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
