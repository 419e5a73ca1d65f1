"""From logical axes to devices: where parameters and activations live; random parameters."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.layouts import LAYOUTS

type Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the layout that spreads a model over it.

    Raises: ValueError for a layout that `LAYOUTS` does not have.
    """

    mesh: Mesh
    layout: str = "tensor"

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; allowed: {', '.join(sorted(LAYOUTS))}")

    def ways(self, axis: str) -> int:
        """Into how many parts the logical axis is split."""
        mesh_axis = LAYOUTS[self.layout].get(axis)
        return 1 if mesh_axis is None else self.mesh.shape[mesh_axis]

    @property
    def on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def device_kind(self) -> str | None:
        """Of the one device, such as "NVIDIA H200"; None where there are several, whose kernels
        only run under shard_map."""
        return self.mesh.devices.flat[0].device_kind if self.mesh.size == 1 else None

    def sharding(self, axes: Axes) -> NamedSharding:
        """The sharding of an array with these dimensions (None: one without a name)."""
        layout = LAYOUTS[self.layout]
        names = [None if axis is None else layout.get(axis) for axis in axes]
        while names and names[-1] is None:  # as jitted functions return them, so that == holds
            names.pop()
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Holds an activation to its layout inside a jitted function; nothing on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))


@dataclasses.dataclass(frozen=True)
class Distribution:
    """What a random parameter looks like: uniform around `mean` (with `std` 0 it is all `mean`)."""

    mean: float
    std: float


def random_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    distributions: Mapping[str, Distribution],
    seed: int,
) -> dict[str, jax.Array]:
    """Random parameters, made on the devices where they live; nothing passes through the host.

    A parameter's values depend on the seed, its path and its shape only, not on the mesh.
    """
    return {
        path: _random(
            np.uint32(zlib.crc32(f"{seed} {path}".encode())),
            param.shape,
            param.dtype,
            param.sharding,
            distributions[path],
        )
        for path, param in abstract.items()
    }


# Compiled once per distinct parameter, so once per kind of layer rather than once per layer.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random(
    salt: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    distribution: Distribution,
) -> jax.Array:
    if distribution.std:
        # MurmurHash3's finaliser over each element's index: ten times as fast on the CPU as
        # jax.random, good enough for weights that nobody reads. Odd steps keep the elements of
        # small arrays apart.
        bits = salt + jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B9)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = (bits ^ (bits >> 16)).reshape(shape)
        spread = distribution.std * math.sqrt(3.0) / 2**31
        values = distribution.mean + spread * bits.astype(jnp.int32).astype(jnp.float32)
    else:
        values = jnp.full(shape, distribution.mean)
    return jax.lax.with_sharding_constraint(values.astype(dtype), sharding)
