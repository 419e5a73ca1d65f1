"""Settings that every test runs under: eight CPU devices, float32 matmuls, compiled programs kept
between runs."""

import gc
import os
import pathlib

import pytest

# Before jax is first imported, here and in the engine processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parent.parent / ".cache" / "compiled"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", ".cache/hypothesis")


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_collected():
    """A file's collections look only at what it makes: at all that was there before, each of many
    would take a second."""
    gc.collect()
    gc.freeze()
