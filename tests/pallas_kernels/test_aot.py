"""The real compilers' answer, without their devices: an H200's where jax's CUDA plugin is
installed, a TPU's where libtpu is. tests/fixtures/h200.txtpb describes the card; it is
`client.get_topology_for_devices(jax.devices()).target_config`, read on one.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import AttentionMeta, paged_attention

H200 = pathlib.Path(__file__).parents[1] / "fixtures" / "h200.txtpb"
LAYERS = 2

needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax's CUDA plugin not installed"
)
needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu not installed"
)


def compile_decode(device, impl, heads, kv_heads, head_dim, page_size, dtype, **options):
    """A decode step's attention, LAYERS times, for one device; and the size of its cache."""
    mesh = Mesh(np.array([device]), ("tensor",), axis_types=(AxisType.Auto,))
    rows, width, pages = 32, 128, 8192

    def shape(dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def ints(*dims):
        return shape(dims, jnp.int32)

    meta = AttentionMeta(ints(rows, width), ints(rows), ints(rows + 1), ints(rows), ints())
    q = shape((rows, heads, head_dim), dtype)
    k = shape((rows, kv_heads, head_dim), dtype)
    pool = shape((pages, page_size, 2 * kv_heads, head_dim), dtype)
    attend = functools.partial(paged_attention, sm_scale=0.1, kind="decode", impl=impl, **options)

    def step(q, k, v, pools, meta):
        updated = []
        for kv_pages in pools:
            out, kv_pages = attend(q, k, v, kv_pages, meta)
            q = q + out
            updated.append(kv_pages)
        return q, tuple(updated)

    lowered = jax.jit(step, donate_argnums=3).lower(q, k, k, (pool,) * LAYERS, meta)
    return lowered.compile(), LAYERS * pool.size * pool.dtype.itemsize


def check_memory(compiled, cache_bytes):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 8


def h200():
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=H200.read_text(), topology="1x1x1"
    )
    return topology.devices[0]


@needs_cuda
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype", "options"),
    [
        (32, 8, 128, 16, jnp.bfloat16, {}),
        (4, 1, 128, 64, jnp.bfloat16, {}),
        (64, 8, 64, 16, jnp.bfloat16, {"sliding_window": 128}),
        (16, 8, 256, 16, jnp.bfloat16, {"soft_cap": 50.0, "sliding_window": 4096}),
        (64, 4, 256, 8, jnp.float16, {}),
        (12, 12, 64, 128, jnp.float16, {}),
    ],
)
def test_h200_kernel_spills_nothing_and_copies_no_cache(
    heads, kv_heads, head_dim, page_size, dtype, options, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled, cache_bytes = compile_decode(
        h200(), "gpu", heads, kv_heads, head_dim, page_size, dtype, **options
    )
    check_memory(compiled, cache_bytes)
    said = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "spilled" not in said


@needs_cuda
def test_h200_reference_copies_no_cache():
    check_memory(*compile_decode(h200(), "reference", 32, 8, 128, 16, jnp.bfloat16))


@needs_tpu
@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("impl", ["tpu", "reference"])
def test_tpu_copies_no_cache(name, impl, monkeypatch):
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),  # there is no metadata server to ask
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        monkeypatch.setenv(variable, value)
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    abstract = AbstractDevice(device_kind=device.device_kind, platform="tpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        check_memory(*compile_decode(device, impl, 32, 8, 128, 16, jnp.bfloat16))
