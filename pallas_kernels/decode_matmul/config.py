"""How the GPU kernel cuts its work. Imports no Pallas, which takes half a second and runs nowhere
else."""

import dataclasses

SHARED_BYTES = 227 << 10  # that a thread block may have on Hopper
COPIED_ROWS = 8  # by a copy, of an array that has whole eights or less than one

MIN_WEIGHT = 1 << 22
"""Numbers of a weight, of which smaller ones are multiplied as fast by XLA."""


@dataclasses.dataclass(frozen=True)
class Config:
    """block_n: outputs of a thread block (of each half where gated). block_k: inputs a copy.
    splits: shares of the inputs."""

    block_n: int
    block_k: int = 64
    splits: int = 1
    stages: int = 0

    def num_stages(self, rows: int, halves: int, *, adds: bool = False) -> int:
        """Copies in flight: as many as shared memory holds; of `decode_matmul_add` beside its rows
        of the residual stream."""
        stage = (rows + halves * self.block_n) * self.block_k * 2
        kept = rows * self.block_n * 2 if adds else 0
        return min(self.stages or 12, (SHARED_BYTES - 2048 - kept) // stage)
