"""Runs a bench's command on a tiny model, its result in a folder of the test."""

import importlib
import json
import pathlib
import sys

import pytest
from engines import write_model

from bench import record


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> pathlib.Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run_bench(monkeypatch, tmp_path):
    """Calls `bench.NAME`'s main with arguments; returns what it stored."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")

    def run(name: str, *arguments: object) -> dict:
        monkeypatch.setattr(sys, "argv", [f"bench.{name}", *map(str, arguments)])
        importlib.import_module(f"bench.{name}").main()
        [path] = (tmp_path / "results").rglob(f"*-{name}.json")
        return json.loads(path.read_text())

    return run
