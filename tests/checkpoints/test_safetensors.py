import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import llama_tensors

from checkpoints.safetensors import INDEX_NAME, SafetensorsSource, read_header
from jaxserve.types import CheckpointError

SHARD = "model-00002-of-00003.safetensors"


def read_all(folder):
    source = SafetensorsSource(folder)
    read = {name: source.read(name) for name in source.names()}
    source.close()
    return read


def write_raw(folder, header, data=b""):
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


@pytest.mark.parametrize("kind", ["folder", "sharded_folder"])
def test_reads_what_was_written(kind, request):
    read = read_all(request.getfixturevalue(kind))
    expected = llama_tensors()
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(read[name], value)


@pytest.mark.parametrize(
    "dtype",
    [
        np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16,
        np.int8, np.uint8, np.bool_,
    ],
)  # fmt: skip
def test_reads_every_dtype_and_shape(tmp_path, dtype):
    expected = {
        "matrix": np.arange(6).reshape(2, 3).astype(dtype),
        "scalar": np.asarray(1, dtype),
        "empty": np.zeros((0, 4), dtype),
        "odd": np.arange(3).astype(dtype),
    }
    safetensors.numpy.save_file(expected, tmp_path / "model.safetensors")
    read = read_all(tmp_path)
    for name, value in expected.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)


def test_a_read_tensor_is_its_own_memory(folder):
    source = SafetensorsSource(folder)
    first = source.read("model.norm.weight")
    first[:] = 0
    assert source.read("model.norm.weight").any()


def test_missing_shard(sharded_folder):
    (sharded_folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"1 are missing: {SHARD}"):
        SafetensorsSource(sharded_folder)


def test_truncated_shard(sharded_folder):
    whole = (sharded_folder / SHARD).read_bytes()
    (sharded_folder / SHARD).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{SHARD}.*truncated"):
        SafetensorsSource(sharded_folder)


@settings(deadline=None)
@given(data=st.data())
def test_truncated_anywhere(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("truncated")
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones((3, 5), np.float32)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError):
        SafetensorsSource(folder)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_header_reads_or_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones((3, 5), np.float32), "b": np.zeros(2)}, path)
    whole = bytearray(path.read_bytes())
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        source = SafetensorsSource(folder)
    except CheckpointError:
        return
    for name, spec in source.names().items():
        assert source.read(name).shape == spec.shape


def test_file_that_shrinks_after_it_was_opened(folder):
    source = SafetensorsSource(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        source.read(list(source.names())[-1])


def edit_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_index_naming_a_tensor_that_its_file_lacks(sharded_folder):
    edit_index(sharded_folder, lambda weights: weights.update({"model.ghost.weight": SHARD}))
    with pytest.raises(CheckpointError, match=rf"{SHARD}: lacks .*model\.ghost\.weight"):
        SafetensorsSource(sharded_folder)


def test_index_leaving_out_a_tensor(sharded_folder):
    edit_index(sharded_folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"does not place in it: model\.norm\.weight"):
        SafetensorsSource(sharded_folder)


@pytest.mark.parametrize(
    "place", ["../other.safetensors", "/etc/passwd", "model.bin", 3, "x/y.safetensors"]
)
def test_index_reaching_elsewhere(sharded_folder, place):
    edit_index(sharded_folder, lambda weights: weights.update({"model.norm.weight": place}))
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file name"):
        SafetensorsSource(sharded_folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_that_is_no_index(sharded_folder, text):
    (sharded_folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsSource(sharded_folder)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        ([], "holds a list"),
        ({"a": 3}, "lacks a dtype, shape or data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks a dtype, shape or data_offsets"),
        ({"a": ENTRY | {"data_offsets": [0, 4, 8]}}, "lacks a dtype, shape or data_offsets"),
        ({"a": ENTRY | {"shape": "2"}}, "has shape '2'"),
        ({"a": ENTRY | {"shape": [-2]}}, "has shape"),
        ({"a": ENTRY | {"shape": [True, 2]}}, "has shape"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, "offsets -8, 0"),
        ({"a": ENTRY | {"dtype": "F4"}}, "dtype 'F4'; known: F64"),
        ({"a": ENTRY | {"shape": [3]}}, r"8 bytes, but float32\[3\] takes 12"),
        ({"a": ENTRY, "b": ENTRY}, "'a' and 'b' overlap"),
        ({"a": ENTRY | {"shape": [4], "data_offsets": [0, 16]}}, "truncated"),
    ],
)
def test_headers_that_say_nonsense(tmp_path, header, message):
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(write_raw(tmp_path, header, bytes(8)))


def test_header_longer_than_the_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="states a header of"):
        read_header(tmp_path / "model.safetensors")
