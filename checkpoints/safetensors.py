"""safetensors checkpoints, one file or shards under an index. Imports no jax.

The format (https://github.com/huggingface/safetensors#format): 8 bytes length, a JSON header of
that length, then raw little-endian tensors. Read here directly, so that each tensor lands in memory
once and each fault has a name.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.files import listed, read_bytes_at, read_json
from checkpoints.source import TensorSpec
from jaxserve.types import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class Stored(NamedTuple):
    """Where a tensor lies."""

    path: pathlib.Path
    offset: int
    spec: TensorSpec


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises CheckpointError unless the header is sound and the file holds all its bytes.
    """
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
    length = int(read_bytes_at(path, 0, 8, "the header's length").view("<u8")[0])
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(
            f"{path}: states a header of {length} bytes in a file of {file_bytes}; truncated, "
            "or not safetensors"
        )
    try:
        header = json.loads(read_bytes_at(path, 8, length, "the header").tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path}: the header holds a {type(header).__name__}, expected an object"
        )
    start = 8 + length
    tensors = {
        name: _stored(path, name, entry, start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    end, last = start, ""
    for name, (_, offset, spec) in tensors.items():
        if offset < end:
            raise CheckpointError(f"{path}: tensors {last!r} and {name!r} overlap")
        end, last = offset + _num_bytes(spec), name
    if end > file_bytes:
        raise CheckpointError(
            f"{path}: is {file_bytes} bytes, but tensor {last!r} ends at byte {end}; the file "
            "is truncated"
        )
    return tensors


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _stored(path: pathlib.Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} lacks a dtype, shape or data_offsets in the header"
        ) from error
    if not (
        isinstance(shape, list) and all(type(n) is int and n >= 0 for n in [*shape, begin, end])
    ):
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {shape!r} and offsets {begin!r}, {end!r}"
        )
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPES)}"
        )
    spec = TensorSpec(tuple(shape), DTYPES[dtype])
    if end - begin != _num_bytes(spec):
        raise CheckpointError(
            f"{path}: tensor {name!r} has {end - begin} bytes, but {spec} takes {_num_bytes(spec)}"
        )
    return Stored(path, start + begin, spec)


class SafetensorsSource:
    """The `TensorSource` of a Hugging Face folder: `model.safetensors.index.json` and its shards,
    else one file.
    """

    def __init__(self, folder: pathlib.Path):
        index = folder / INDEX_NAME
        self._tensors = (
            _read_shards(folder, index) if index.is_file() else read_header(folder / SINGLE_NAME)
        )
        self._open = True

    def names(self) -> Mapping[str, TensorSpec]:
        return {name: stored.spec for name, stored in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        assert self._open, "the source is closed"
        path, offset, spec = self._tensors[name]
        data = read_bytes_at(path, offset, _num_bytes(spec), f"tensor {name!r}")
        return data.view(spec.dtype).reshape(spec.shape)

    def close(self) -> None:
        self._open = False


def _read_shards(folder: pathlib.Path, index: pathlib.Path) -> dict[str, Stored]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map of tensor names to file names")
    for name, shard in weight_map.items():
        # A plain name only: an index must not reach outside its folder.
        if (
            not isinstance(shard, str)
            or pathlib.PurePath(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{index}: places tensor {name!r} in {shard!r}, which is not a .safetensors "
                "file name"
            )
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(
            f"{index}: names {len(shards)} files, of which {len(missing)} are missing: "
            f"{listed(missing)}"
        )
    found: dict[str, Stored] = {}
    for shard in shards:
        tensors = read_header(folder / shard)
        expected = {name for name, place in weight_map.items() if place == shard}
        if absent := sorted(expected - tensors.keys()):
            raise CheckpointError(
                f"{folder / shard}: lacks tensors that {INDEX_NAME} places in it: {listed(absent)}"
            )
        if extra := sorted(tensors.keys() - expected):
            raise CheckpointError(
                f"{folder / shard}: holds tensors that {INDEX_NAME} does not place in it: "
                f"{listed(extra)}"
            )
        found |= tensors
    return found
