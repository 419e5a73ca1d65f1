import pathlib

import pytest
from tiny_checkpoints import gguf_tensors, llama_tensors, write_folder, write_gguf


@pytest.fixture
def gguf_path(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(llama_tensors()))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_folder(tmp_path / "tiny", llama_tensors())


@pytest.fixture
def sharded_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_folder(tmp_path / "sharded", llama_tensors(), num_shards=3)
