"""The KV cache on the device: one array of pages per layer, and how many pages there is room
for."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

CPU_KV_BYTES = 1 << 30
"""Most that the cache takes of a CPU's memory unless num_pages asks for more."""


def kv_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """[pages, page_size, 2K, H]: kv head h has K at 2h and V at 2h+1, so sharding axis 2 keeps them
    together."""
    return num_pages, page_size, 2 * num_kv_heads, head_dim


def allocate(
    shape: tuple[int, int, int, int], num_layers: int, dtype: jnp.dtype, sharding: NamedSharding
) -> tuple[jax.Array, ...]:
    """Empty pages for every layer, made where they stay. Their content is undefined until
    written."""
    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return tuple(make() for _ in range(num_layers))


def round_down(count: int, significant_bits: int) -> int:
    """The largest number up to `count` with that many significant bits.

    Page counts are part of every compiled step's shapes: rounded, they come out the same at the
    next start although a little more or less memory is free then, and the compile cache serves.
    """
    shift = max(count.bit_length() - significant_bits, 0)
    return count >> shift << shift


def usable_bytes(device: Any, memory_fraction: float) -> int:
    """Bytes on `device` that weights, temporaries and cache may take together, beyond what is in
    use now.

    On a CPU: `memory_fraction` of what the machine (or its control group) has free. On a GPU the
    allocator was given its fraction when JAX started in this process (config.set_device_memory), so
    all that it has left counts.
    """
    if device.platform == "cpu":
        return int(_host_available_bytes() * memory_fraction)
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _host_available_bytes() -> int:
    fields = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except FileNotFoundError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)
