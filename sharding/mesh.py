"""The device mesh: three named axes that every layout speaks of."""

from collections.abc import Sequence
from typing import Protocol

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "expert", "tensor")


class MeshShape(Protocol):
    """How many devices each axis has."""

    @property
    def data(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def tensor(self) -> int: ...


def make_mesh(
    shape: MeshShape,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh with axes data, expert, tensor over the first devices that it needs.

    Raises: ValueError if there are fewer devices than data * expert * tensor.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (shape.data, shape.expert, shape.tensor)
    needed = shape.data * shape.expert * shape.tensor
    if needed > len(devices):
        wanted = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ValueError(
            f"the mesh ({wanted}) needs {needed} devices; there are {len(devices)}"
            " (on the CPU JAX_NUM_CPU_DEVICES sets how many)"
        )
    return jax.make_mesh(
        sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=list(devices[:needed])
    )
