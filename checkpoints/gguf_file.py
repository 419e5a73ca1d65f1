"""The GGUF container: metadata and tensors of a file, checked against its length. Imports no jax.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader
makes an array of each of the 100,000 strings in a vocabulary, which takes seconds, and reads past
the end of a truncated file without a word; block layouts and dequantisation are the package's.
"""

import concurrent.futures
import math
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.files import listed, read_bytes_at
from checkpoints.source import TensorSpec
from jaxserve.types import CheckpointError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
MAX_NESTING = 4
CHUNK_ELEMENTS = 1 << 17
"""Values dequantised at a time: enough to hide Python, few enough to stay in the cache."""

MAX_THREADS = 16

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9

PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.I64: np.dtype(np.int64),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I8: np.dtype(np.int8),
}
"""Types that are read as they are; all others are blocks that become float32."""


class GgufTensor(NamedTuple):
    """Where a tensor lies. `shape` is row-major (GGUF itself counts the other way)."""

    path: pathlib.Path
    offset: int
    shape: tuple[int, ...]
    kind: GGMLQuantizationType

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, PLAIN_DTYPES.get(self.kind, np.dtype(np.float32)))

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes


class GgufFile(NamedTuple):
    metadata: dict[str, Any]
    """Numbers, booleans, strings and lists of them."""
    tensors: dict[str, GgufTensor]


def read_gguf(path: pathlib.Path) -> GgufFile:
    """Header of a file, or of all parts of a split one (`-00001-of-00003.gguf`), as one.

    Raises: CheckpointError if a part is missing, damaged or shorter than its tensors.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int):
        raise CheckpointError(f"{path}: split.count is {count!r}; expected a number")
    if count <= 1:
        return first
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} parts, but not named like NAME-00001-of-{count:05d}.gguf"
        )
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path}: is one of {count} parts, of which these are missing: {listed(missing)}"
        )
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        read = first if part == path else _read_part(part)
        metadata = metadata or read.metadata
        if twice := sorted(tensors.keys() & read.tensors.keys()):
            raise CheckpointError(f"{part}: repeats tensors of an earlier part: {listed(twice)}")
        tensors |= read.tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{path}: the {count} parts hold {len(tensors)} tensors, {expected} are announced"
        )
    return GgufFile(metadata, tensors)


def _read_part(path: pathlib.Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: is empty") from error  # all that mmap has against a file


class _Parser:
    """One pass over a header.

    Every length is checked against what is left before anything is made of it.
    """

    def __init__(self, path: pathlib.Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > self.size - start:
            raise self.fail(
                f"needs {num_bytes} bytes at byte {start} of {self.size}; the file is "
                "truncated or damaged"
            )
        self.at = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self.data, self.need(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.need(length)
        return self.text(start, length)

    def text(self, start: int, length: int) -> str:
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(
                f"holds a string at byte {start} that is not UTF-8: {error.reason}"
            ) from error

    def strings(self, count: int) -> list[str]:
        unpack = struct.Struct("<Q").unpack_from
        data, at, size = self.data, self.at, self.size
        found = []
        for _ in range(count):  # 100,000 rounds for a vocabulary: kept free of calls
            length = unpack(data, at)[0] if at + 8 <= size else size
            end = at + 8 + length
            if end > size:
                raise self.fail(
                    f"ends inside a list of strings at byte {at}; the file is truncated or damaged"
                )
            try:
                found.append(data[at + 8 : end].decode())
            except UnicodeDecodeError as error:
                raise self.fail(
                    f"holds a string at byte {at + 8} that is not UTF-8: {error.reason}"
                ) from error
            at = end
        self.at = at
        return found

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or nesting == MAX_NESTING:
            raise self.fail(
                f"has a value of kind {kind} at byte {self.at}, nested {nesting} deep; not "
                "known here"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if item in SCALARS:
            form = SCALARS[item]
            return list(
                struct.unpack_from(
                    f"<{count}{form}", self.data, self.need(count * struct.calcsize(form))
                )
            )
        if count * 8 > self.size - self.at:  # a string or a list takes 8 bytes at least
            raise self.fail(
                f"states a list of {count} at byte {self.at} of {self.size}; truncated or damaged"
            )
        if item == STRING:
            return self.strings(count)
        return [self.value(item, nesting + 1) for _ in range(count)]

    def parse(self) -> GgufFile:
        if self.size < 24 or self.data[:4] != b"GGUF":
            raise self.fail(
                f"is not a GGUF file ({self.size} bytes, starts with {self.data[:4]!r})"
            )
        self.at = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            order = " in big-endian order" if version & 0xFFFF == 0 else ""
            raise self.fail(
                f"is GGUF version {version}{order}; handled: {', '.join(map(str, VERSIONS))}, "
                "little-endian"
            )
        num_tensors, num_values = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.string()
            if key in metadata:
                raise self.fail(f"states {key!r} twice")
            metadata[key] = self.value(self.scalar("I"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}; allowed: a power of two")
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.fail(f"holds tensor {name!r} twice")
            tensor = GgufTensor(self.path, start + offset, shape, kind)
            end = tensor.offset + tensor.num_bytes
            if end > self.size:
                raise self.fail(
                    f"is {self.size} bytes, but tensor {name!r} ends at byte {end}; the file "
                    "is truncated"
                )
            tensors[name] = tensor
        return GgufFile(metadata, tensors)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self.fail(f"tensor {name!r} has {num_dimensions} dimensions; the file is damaged")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        code, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(code)
            block, _ = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self.fail(
                f"tensor {name!r} has type {code}, which the gguf package does not know"
            ) from error
        if block > 1 and not shape:
            raise self.fail(f"tensor {name!r} is {kind.name} but has no dimensions")
        if shape and shape[-1] % block:
            raise self.fail(
                f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {kind.name}'s "
                f"block of {block}"
            )
        return name, shape, kind, offset


def read_blocks(tensor: GgufTensor, name: str) -> np.ndarray:
    """A tensor's bytes, one row a row: uint8 `[rows, row bytes]`."""
    rows = math.prod(tensor.shape[:-1])
    data = read_bytes_at(tensor.path, tensor.offset, tensor.num_bytes, f"tensor {name!r}")
    return data.reshape(rows, tensor.num_bytes // rows if rows else 0)


def decode_blocks(
    blocks: np.ndarray, tensor: GgufTensor, name: str, pool: concurrent.futures.Executor
) -> np.ndarray:
    """Values of `blocks` in the tensor's shape and `spec` dtype; the pool's threads share the work.

    Raises: CheckpointError for a type that the gguf package can't dequantise.
    """
    if tensor.kind in PLAIN_DTYPES:
        return blocks.reshape(-1).view(PLAIN_DTYPES[tensor.kind]).reshape(tensor.shape)
    if not blocks.size:
        return np.empty(tensor.shape, np.float32)
    width = tensor.shape[-1]
    values = np.empty((blocks.shape[0], width), np.float32)
    step = max(1, CHUNK_ELEMENTS // max(1, width))

    def decode(start: int) -> None:
        # As one row, since the package goes over 16 rows at a time, and those may be short.
        chunk = blocks[start : start + step].reshape(1, -1)
        values[start : start + step] = dequantize(chunk, tensor.kind).reshape(-1, width)

    try:
        decode(0)  # alone: it fills the package's lookup tables
        list(pool.map(decode, range(step, blocks.shape[0], step)))
    except NotImplementedError as error:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} is {tensor.kind.name}, which the gguf package "
            "can't dequantise"
        ) from error
    return values.reshape(tensor.shape)


def decoding_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Threads for `decode_blocks`."""
    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    return concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="dequantise")
