"""Keeps what a kernel lowers to the same in every program and at every start.

Mosaic GPU numbers the kernels that a process lowers, and writes the number into each, to name the
files that it may dump (JAX 0.11.2). So equal kernels differ: programs that share one would each
compile it, and none would be found by what it lowers to.
"""

import functools
import os
from typing import Any

from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.extend.mlir import ir

gpu: Any = mosaic_gpu  # whose annotations call its dialect private
BASENAME = "mosaic_gpu.dump_basename"


@functools.cache
def leave_out_numbers() -> None:
    """Names dumps after the kernels alone, unless there are any. Every module of GPU kernels that
    steps call says so."""
    get_or_set = gpu.dialect.get_or_set_dump_options

    def with_name(module: Any) -> Any:
        attributes = module.operation.attributes
        if BASENAME not in attributes:
            name = ir.StringAttr(attributes["sym_name"]).value
            attributes[BASENAME] = ir.StringAttr.get(name, module.context)
        return get_or_set(module)

    if "MOSAIC_GPU_DUMP_TO" not in os.environ:
        gpu.dialect.get_or_set_dump_options = with_name
