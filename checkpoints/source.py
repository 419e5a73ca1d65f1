"""What every checkpoint format looks like to the loader: named tensors, read one at a time.

Imports no jax.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

FLOAT_DTYPES: tuple[np.dtype, ...] = tuple(
    np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)
"""Dtypes that weights may have; whole numbers and 8-bit floats need scales that nothing here
applies.
"""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor as `read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class TensorSource(Protocol):
    """Named tensors of a checkpoint, under Hugging Face's names.

    Opening one checks what can be checked without reading the weights: that every file is there,
    whole, and holds the tensors it should. Raises CheckpointError, from opening and from `read`.
    """

    def names(self) -> Mapping[str, TensorSpec]:
        """All tensors, in the order in which they lie in the files."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in memory of its own, which the source does not keep."""
        ...

    def close(self) -> None:
        """Ends the source; reading after it is an error."""
        ...
