"""Reading pieces of files with errors that say what is missing. Imports no jax."""

import json
import pathlib
from typing import Any

import numpy as np

from jaxserve.types import CheckpointError


def read_bytes_at(path: pathlib.Path, offset: int, num_bytes: int, what: str) -> np.ndarray:
    """Bytes [offset, offset + num_bytes) of a file as a new uint8 array.

    `what` names them in the CheckpointError that a short file raises. Not a memory map: pages of a
    map count as the process's memory, and fault if the file shrinks after it was checked.
    """
    try:
        data = np.fromfile(path, np.uint8, num_bytes, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path}: can't read {what}: {error.strerror or error}") from error
    if data.size != num_bytes:
        raise CheckpointError(
            f"{path}: ends {num_bytes - data.size} bytes inside {what}; the file is truncated"
        )
    return data


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def listed(names: Any, limit: int = 8) -> str:
    """Names for an error message: the first few, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
