"""From hidden states of a prompt's chunks to one vector: what an embedding request gets."""

import dataclasses

import numpy as np

from jaxserve.types import Pooling


@dataclasses.dataclass
class PooledParts:
    """What the steps of one prompt brought; after preemption they come again, cut elsewhere."""

    parts: dict[int, tuple[int, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    """By a chunk's first position: its end, its last state, the sum of its states; f32[D]."""

    def add(self, start: int, end: int, last: np.ndarray, total: np.ndarray) -> None:
        self.parts[start] = (end, last, total)

    def result(self, pooling: Pooling, num_tokens: int) -> np.ndarray:
        """f32[D] of a prompt of `num_tokens`, all of which has been computed."""
        if pooling == "last":
            [last] = [last for end, last, _ in self.parts.values() if end == num_tokens][-1:]
            return last
        position, total = 0, np.zeros(1)
        while position < num_tokens:
            position, _, part = self.parts[position]
            total = total + part.astype(np.float64)
        return (total / num_tokens).astype(np.float32)
