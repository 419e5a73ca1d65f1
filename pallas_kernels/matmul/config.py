"""How the GPU kernel cuts its work. Imports no Pallas, which takes half a second and runs nowhere
else."""

import dataclasses

BLOCK_ROWS = 128
"""Of a thread block's tile."""
CLUSTER = 2
"""Thread blocks that share a weight's copies, each with rows of its own. Of four, fewer than a
card's multiprocessors would hold run at once, and the rest after them: half as fast."""
CLUSTERS = 132 // CLUSTER
"""One thread block a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Config:
    """block_n: outputs of a tile, of gate and of up. block_k: inputs a copy. stages: copies in
    flight. strip: clusters' rows that are gone through for some outputs before the next outputs."""

    block_n: int
    block_k: int = 64
    stages: int = 4
    strip: int = 8
