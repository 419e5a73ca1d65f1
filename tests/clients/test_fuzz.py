"""schemathesis over the server's own OpenAPI: no answer is a 5xx, none takes long."""

import os
import pathlib
import re
import subprocess
import sys
import urllib.request

import pytest

HOOKS = pathlib.Path(__file__).with_name("fuzz_hooks.py")
SECONDS = 30
"""That an answer may take; the longest text that the server has room for takes a few."""


def fuzz(url, folder, phases, *options):
    """Runs schemathesis; the number of cases that it made, all of which passed."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks=not_a_server_error", f"--phases={phases}", f"--request-timeout={SECONDS}"),
        *("--continue-on-failure", "--generation-database=none", "--no-color", "--warnings=off"),
        *("--suppress-health-check=all", *options),
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    told = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout[-5000:] + told.stderr[-2000:]
    print(told.stdout[-1500:])  # its counts, with -s
    with urllib.request.urlopen(f"{url}/health_generate", timeout=SECONDS) as answer:
        assert answer.status == 200
    return int(re.search(r"(\d+) generated", told.stdout)[1])


def test_some_cases(url, tmp_path):
    assert fuzz(url, tmp_path, "fuzzing", "--max-examples=6", "--seed=1") > 100


@pytest.mark.slow
def test_thousands_of_cases(url, tmp_path):
    assert fuzz(url, tmp_path, "coverage,fuzzing,stateful", "--max-examples=60") >= 5000
