"""How a bench stores what it measured: one JSON file, with the machine, the versions and the
command beside the figures."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def cpu_name() -> str:
    """The processor and how many cores this process may use, such as 'AMD EPYC x2'."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    return f"{model.group(1) if model else platform.machine()} x{text.count('processor	:')}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Short hash of HEAD, with '+' when the tree, results aside, differs from it; 'unknown' outside
    a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)bench/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, fastest and slowest, in milliseconds."""
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 4),
        "min_ms": round(min(seconds) * 1e3, 4),
        "max_ms": round(max(seconds) * 1e3, 4),
        "repeats": len(seconds),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99, in milliseconds; between two measurements, interpolated."""
    return {
        f"p{p}_ms": round(float(np.percentile(np.array(seconds), p)) * 1e3, 2) for p in (50, 90, 99)
    }


def store(name: str, device: str, figures: dict[str, Any]) -> pathlib.Path:
    """Prints the figures and writes them to results/<device>/<date>-<commit>-<name>.json; a result
    that is there already is kept, and the new one numbered."""
    now = datetime.datetime.now(datetime.UTC)
    hash = commit()
    record = {
        "bench": name,
        "device": device,
        "date": now.isoformat(timespec="seconds"),
        "commit": hash,
        "command": "python -m " + " ".join([f"bench.{name}", *sys.argv[1:]]),
        "versions": versions(),
        "figures": figures,
    }
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{now:%Y-%m-%d}-{hash.rstrip('+')}-{name}"
    path, count = folder / f"{stem}.json", 1
    while path.exists():
        count += 1
        path = folder / f"{stem}-{count}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    print(f"stored in {path.relative_to(RESULTS.parent.parent)}")
    return path
