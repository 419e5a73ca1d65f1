"""Turns any model that jaxserve loads into a folder that loads fast and without the original."""

import math
import pathlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import gguf, load, orbax
from checkpoints.resolve import ModelFiles, open_source, resolve
from checkpoints.source import FLOAT_DTYPES, TensorSpec
from jaxserve.config import MeshConfig
from jaxserve.entry import gguf_tokenizer
from jaxserve.entry.stages import Stages, shown
from jaxserve.models import registry
from jaxserve.types import CheckpointError
from sharding.mesh import make_mesh

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def convert(
    model: str,
    out: pathlib.Path | str,
    dtype: Dtype = "auto",
    progress: bool = True,
) -> pathlib.Path:
    """Writes `model` as a converted folder `out`, which must not exist or be empty; returns it.

    `dtype` of the stored parameters; auto: that of most of the original's bytes, float32 for
    quantised ones. The folder appears under its name only when it is whole. With `progress`, a bar
    of bytes on stderr where that is a terminal, one line a stage elsewhere.
    Raises: CheckpointError, UnsupportedModel.
    """
    target = pathlib.Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty folder")
    files = resolve(model)
    if files.kind == "orbax":
        raise CheckpointError(f"{files.path}: is a converted folder already")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work,
            shown(progress) as stages,
        ):
            folder = pathlib.Path(work) / "converted"
            folder.mkdir()
            _write_tokenizer(files, folder)
            params, config = _load(files, dtype, stages)
            num_bytes = sum(array.nbytes for array in params.values())
            writing = stages.start("writing", str(target), num_bytes)
            orbax.save(folder, params, config, files.generation_config)
            folder.replace(target)
            stages.reach(writing, num_bytes)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written: {error}") from error
    return target


def _load(
    files: ModelFiles, dtype: Dtype, stages: Stages
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The parameters on one CPU device, and the config with the dtype that they have."""
    mesh = make_mesh(MeshConfig(), jax.devices("cpu"))
    source = open_source(files)
    try:
        chosen = np.dtype(
            _main_dtype(source.names().values()) if dtype == "auto" else jnp.dtype(dtype)
        )
        built = registry.build(files.config, mesh, "tensor", chosen)
        num_bytes = sum(spec.size * spec.dtype.itemsize for spec in built.abstract.values())
        reading = stages.start("reading", f"{files.path} as {chosen.name}", num_bytes)
        params = load.load_params(
            source,
            built.rules,
            built.abstract,
            built.config,
            built.ignored,
            lambda done, total: stages.reach(reading, done),
        )
    finally:
        source.close()
    config = {key: value for key, value in files.config.items() if key != "torch_dtype"}
    return params, config | {"dtype": chosen.name}


def _main_dtype(specs: Iterable[TensorSpec]) -> np.dtype:
    """The dtype of most bytes, of those that parameters can have here; float32 if none is."""
    num_bytes: Counter[np.dtype] = Counter()
    for shape, dtype in specs:
        if dtype in FLOAT_DTYPES and dtype != np.float64:
            num_bytes[dtype] += math.prod(shape) * dtype.itemsize
    return max(num_bytes, key=num_bytes.__getitem__, default=np.dtype(np.float32))


def _write_tokenizer(files: ModelFiles, folder: pathlib.Path) -> None:
    """Tokenizer and chat template: copied from a Hugging Face folder, rebuilt from a GGUF file's
    metadata.
    """
    if files.kind == "gguf":
        gguf_tokenizer.build(gguf.tokenizer_parts(files.path)).save(folder)
        return
    for name in TOKENIZER_FILES:
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, folder / name)
