import pathlib

import pytest
import tiny_folder as tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> pathlib.Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")
