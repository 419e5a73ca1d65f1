"""The real compilers' answer, without their devices: an H200's by jax's CUDA plugin, a TPU's by
libtpu; `make test-aot` installs both. tests/fixtures/h200.txtpb describes the card; it is
`client.get_topology_for_devices(jax.devices()).target_config`, read on one.
"""

import collections
import functools
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.config import MeshConfig
from jaxserve.execution import lowering
from jaxserve.execution.buckets import Buckets, StepShape
from jaxserve.execution.programs import Exported
from jaxserve.execution.runner import Runner
from jaxserve.models import registry
from pallas_kernels.add_norm.gpu import add_norm
from pallas_kernels.decode_matmul.api import (
    BLOCK_ROWS,
    MAX_ROWS,
    MIN_TWO_BLOCKS_ROWS,
    TUNED,
    choose,
    choose_adding,
)
from pallas_kernels.decode_matmul.gpu import decode_matmul, decode_matmul_add
from pallas_kernels.matmul.api import choose_gated
from pallas_kernels.matmul.gpu import gated_matmul
from pallas_kernels.paged_attention import AttentionMeta, gpu_rotate, paged_attention
from sharding.mesh import make_mesh

LLAMA_8B = (
    pathlib.Path(__file__).parent.parent / "bench" / "models" / "llama-3.1-8b" / "config.json"
)
H200 = pathlib.Path(__file__).parent / "fixtures" / "h200.txtpb"
LAYERS = 2

pytestmark = pytest.mark.aot


@pytest.fixture(autouse=True)
def no_compile_cache():
    """What was compiled for a device that isn't here can't be read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def compile_decode(device, impl, heads, kv_heads, head_dim, page_size, dtype, queries=1, **options):
    """A decode step's attention, LAYERS times, for one device; and the size of its cache."""
    mesh = Mesh(np.array([device]), ("tensor",), axis_types=(AxisType.Auto,))
    rows, width, pages = 32, 128, 8192

    def shape(dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def ints(*dims):
        return shape(dims, jnp.int32)

    meta = AttentionMeta(
        ints(rows, width), ints(rows), ints(rows + 1), ints(rows * queries), ints()
    )
    q = shape((rows * queries, heads, head_dim), dtype)
    k = shape((rows * queries, kv_heads, head_dim), dtype)
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


def compile_rotation(num_parts, num_tokens, dtype):
    """Of an 8B Llama; and the size of its cache."""
    whole = NamedSharding(make_mesh(MeshConfig(), h200()), PartitionSpec())
    qkv, turns, pages, slots = (
        jax.ShapeDtypeStruct(dims, dtype, sharding=whole)
        for dims, dtype in (
            ((num_parts, num_tokens, 8, 6, 128), dtype),
            ((num_tokens, 64), jnp.float32),
            ((8192, 16, 16, 128), jnp.bfloat16),
            ((num_tokens,), jnp.int32),
        )
    )
    rotate = jax.jit(gpu_rotate.rotate_and_write, donate_argnums=3)
    return rotate.lower(qkv, turns, turns, pages, slots).compile(), pages.size * 2


def check_memory(compiled, cache_bytes):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 8


def kernels(text, name):
    """How often a program calls the Mosaic GPU kernels whose name starts so."""
    return sum("mosaic_gpu_v2" in line and f"/{name}" in line for line in text.splitlines())


def operands(text, name):
    """Of the calls of such kernels, in order, by themselves or in a fusion with a slice."""
    found = []
    computations, entry = text.split("\nENTRY")
    within = dict(re.findall(r"^%(\S+) \(.*?\n(.*?)^}", computations, re.DOTALL | re.MULTILINE))
    for line in entry.splitlines():
        called = re.search(r"calls=%(\S+?),", line)
        if kernels(within.get(called[1], "") if called else line, name):
            [inside] = re.findall(r" (?:fusion|custom-call)\((.*?)\), ", line)
            found.append(set(re.sub(r"/\*.*?\*/", "", inside).split(", ")))
    return found


def h200(num_devices=1):
    """Devices of one host with that many H200s."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=H200.read_text(),
        topology=f"1x1x{num_devices}",
    )
    return topology.devices


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype", "options"),
    [
        (32, 8, 128, 16, jnp.bfloat16, {}),
        (4, 1, 128, 64, jnp.bfloat16, {}),
        (64, 8, 64, 16, jnp.bfloat16, {"sliding_window": 128, "sinks": np.zeros(64, np.float32)}),
        (16, 8, 256, 16, jnp.bfloat16, {"soft_cap": 50.0, "sliding_window": 4096}),
        (64, 4, 256, 8, jnp.float16, {}),
        (12, 12, 64, 128, jnp.float16, {}),
        (9, 3, 64, 32, jnp.bfloat16, {}),
        (20, 2, 128, 16, jnp.bfloat16, {}),
        (64, 1, 128, 16, jnp.bfloat16, {}),
        (8, 8, 32, 16, jnp.bfloat16, {}),
        (32, 32, 96, 16, jnp.bfloat16, {}),
        (16, 4, 224, 16, jnp.bfloat16, {}),
        (32, 8, 128, 16, jnp.bfloat16, {"queries": 4}),
        (64, 8, 64, 16, jnp.bfloat16, {"queries": 8, "sliding_window": 128}),
        (16, 8, 256, 16, jnp.bfloat16, {"queries": 4, "soft_cap": 50.0}),
    ],
)
def test_h200_kernel_spills_nothing_and_copies_no_cache(
    heads, kv_heads, head_dim, page_size, dtype, options, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled, cache_bytes = compile_decode(
        h200()[0], "gpu", heads, kv_heads, head_dim, page_size, dtype, **options
    )
    check_memory(compiled, cache_bytes)
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    assert "spilled" not in said
    assert kernels(compiled.as_text(), "paged_decode") == LAYERS


def test_h200_reference_copies_no_cache():
    check_memory(*compile_decode(h200()[0], "reference", 32, 8, 128, 16, jnp.bfloat16))


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


def test_h200_kernels_that_start_early_read_only_what_is_old_before_they_wait(monkeypatch, capfd):
    # kernels that no other test compiles: of equal ones only the first is dumped
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_decode(h200()[0], "gpu", 24, 6, 128, 16, jnp.bfloat16)
    whole = NamedSharding(make_mesh(MeshConfig(), h200()), PartitionSpec())
    x, weight, square, wide, parts, row, squares = (
        jax.ShapeDtypeStruct(dims, dtype, sharding=whole)
        for dims, dtype in (
            ((8, 4096), jnp.bfloat16),
            ((6144, 4096), jnp.bfloat16),
            ((4096, 4096), jnp.bfloat16),
            ((12288, 2, 4096), jnp.bfloat16),
            ((4, 8, 4096), jnp.float32),
            ((4096,), jnp.bfloat16),
            ((64, 128), jnp.float32),
        )
    )
    for weights, more in ((weight, ()), (wide, (squares,))):
        config = choose("NVIDIA H200", 8, weights.shape, x.dtype)
        product = functools.partial(decode_matmul, config=config, gated=weights is wide)
        jax.jit(product).lower(x, weights, *more).compile()
    config = choose_adding("NVIDIA H200", 8, square.shape, x.dtype)
    adding = functools.partial(decode_matmul_add, config=config)
    jax.jit(adding).lower(x, square, x, row).compile()
    jax.jit(functools.partial(add_norm, eps=1e-5)).lower(x, parts, row).compile()
    compile_rotation(num_parts=2, num_tokens=8, dtype=jnp.float32)
    found = re.split(r"\.visible \.entry (\w+)_mosaic_gpu_kernel\(", capfd.readouterr().out)
    texts = dict(zip(found[1::2], found[2::2], strict=True))
    assert set(texts) == {
        "paged_decode", "write_kv", "decode_matmul", "decode_matmul_gated", "decode_matmul_add",
        "add_norm", "rotate_and_write",
    }  # fmt: skip
    for name, text in texts.items():
        assert "griddepcontrol.launch_dependents" in text, name
        before, *_ = text.split("griddepcontrol.wait")
        assert before != text, name
        assert not re.search(r"(st|atom|red)\.global|\.global\.shared", before), name
        assert "ld.global" not in before or name == "paged_decode", name  # its plan
        maps = set(re.findall(r"cp\.async\.bulk\.\S+ \[%\w+\], \[(%\w+)", before))
        # of the weight, of the cache
        assert len(maps) == (name.startswith("decode_matmul") or name == "paged_decode"), name


@pytest.mark.parametrize(
    ("num_parts", "num_tokens", "dtype"), [(2, 1, jnp.float32), (1, 2048, jnp.bfloat16)]
)
def test_h200_rotation_spills_nothing_and_copies_no_cache(
    num_parts, num_tokens, dtype, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    check_memory(*compile_rotation(num_parts, num_tokens, dtype))
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        *itertools.product(
            [*TUNED["NVIDIA H200"], (5120, 5120), (8960, 2, 1536)], (1, 64, BLOCK_ROWS)
        ),
        ((14336, 2, 4096), MAX_ROWS),
        ((14336, 2, 4096), MIN_TWO_BLOCKS_ROWS),
        ((4096, 4096), 104),
        ((4096, 4096), 5),
    ],
)
def test_h200_products_spill_nothing(shape, rows, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = make_mesh(MeshConfig(), h200())
    whole = NamedSharding(mesh, PartitionSpec())
    x, weight, parts, row = (
        jax.ShapeDtypeStruct(dims, dtype, sharding=whole)
        for dims, dtype in (
            ((rows, shape[-1]), jnp.bfloat16),
            (shape, jnp.bfloat16),
            ((4, rows, 4096), jnp.float32),
            ((rows, 4096), jnp.bfloat16),
        )
    )
    product = functools.partial(
        decode_matmul,
        config=choose("NVIDIA H200", rows, shape, jnp.dtype(jnp.bfloat16)),
        gated=len(shape) == 3,
    )
    assert (
        jax.jit(product).lower(x, weight).compile().memory_analysis().temp_size_in_bytes < 1 << 20
    )
    scale = jax.ShapeDtypeStruct((4096,), jnp.bfloat16, sharding=whole)
    jax.jit(functools.partial(add_norm, eps=1e-5)).lower(row, parts, scale).compile()
    adds = len(shape) == 2 and choose_adding("NVIDIA H200", rows, shape, x.dtype)
    assert bool(adds) == (shape == (4096, 4096))
    if adds:
        adding = functools.partial(decode_matmul_add, config=adds)
        lowered = jax.jit(adding).lower(x, weight, row, scale)
        squares = jax.ShapeDtypeStruct(lowered.out_info[2].shape, jnp.float32, sharding=whole)
        lowered.compile()
        wide = jax.ShapeDtypeStruct((14336, 2, 4096), jnp.bfloat16, sharding=whole)
        config = choose("NVIDIA H200", rows, wide.shape, x.dtype)
        after = functools.partial(decode_matmul, config=config, gated=True, eps=1e-5)
        jax.jit(after).lower(x, wide, squares).compile()
    said = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@pytest.mark.parametrize("rows", [480, 2048])
def test_h200_gated_product_of_many_rows_spills_nothing(rows, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    whole = NamedSharding(make_mesh(MeshConfig(), h200()), PartitionSpec())
    x, weight = (
        jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=whole)
        for dims in ((rows, 4096), (14336, 2, 4096))
    )
    config = choose_gated("NVIDIA H200", rows, weight.shape, x.dtype)
    compiled = jax.jit(functools.partial(gated_matmul, config=config)).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    assert set(re.findall(r"(\d+) bytes spill", "".join(capfd.readouterr()))) == {"0"}


@pytest.mark.parametrize(
    ("kind", "tokens", "seqs", "tensor"),
    [
        ("decode", 64, 64, 1),
        ("decode", 256, 256, 1),
        ("mixed", 512, 64, 1),
        ("decode", 64, 64, 2),
    ],
)
def test_h200_step_of_an_8b_model_copies_neither_weights_nor_cache(kind, tokens, seqs, tensor):
    """The runner's own step, two layers of it."""
    config = json.loads(LLAMA_8B.read_text()) | {"num_hidden_layers": LAYERS}
    mesh = make_mesh(MeshConfig(tensor=tensor), h200(tensor))
    model = registry.build(config, mesh, "tensor", jnp.bfloat16)
    shape = StepShape(kind, tokens, seqs, pages=256)
    runner = Runner(
        model,
        mesh,
        Buckets((seqs,), (512,), seqs, shape.pages),
        page_size=16,
        kv_dtype=jnp.dtype(jnp.bfloat16),
        attention="gpu",
    )
    runner.num_pages = 8192
    compiled = runner.step_program(shape).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= runner.num_pages * runner.page_bytes
    smallest_weight = 4096 * 4096 * 2 // tensor
    largest_activation = max(seqs * 128256 * 4, tokens * 2 * 14336 * 2)
    assert memory.temp_size_in_bytes < smallest_weight + 3 * largest_activation
    # Plans are made once, not once a layer, and decode's in no more kernels than it must be.
    text = compiled.as_text()
    assert kernels(text, "paged_decode") == LAYERS
    assert kernels(text, "paged_prefill") == LAYERS * (kind == "mixed")
    assert kernels(text, "rotate_and_write") == LAYERS * (tensor == 1)
    assert kernels(text, "write_kv") == LAYERS * (tensor > 1)
    # All that attention reads early is an operand of the kernel ahead, but for the cache.
    writes = operands(text, "write_kv") + operands(text, "rotate_and_write")
    attends = operands(text, "paged_decode")
    assert len(writes) == len(attends) == LAYERS
    for before, after in zip(writes, attends, strict=True):
        assert kind == "mixed" or len(after - before) == 2  # queries, cache
    # Four products a layer, of 256 rows the gated one; two norms, but for the first, which has
    # nothing to add, and those that a product does.
    own = tensor == 1 and tokens <= BLOCK_ROWS
    gated = tensor == 1 and tokens <= MAX_ROWS
    assert kernels(text, "decode_matmul") == LAYERS * (4 if own else int(gated))
    assert kernels(text, "decode_matmul_gated") == LAYERS * gated
    assert kernels(text, "gated_matmul") == LAYERS * (kind == "mixed")
    assert kernels(text, "decode_matmul_add") == LAYERS * own
    assert kernels(text, "add_norm") == ((2 - own) * LAYERS - 1) * (tensor == 1)
    # Parts of products are added by what reads them.
    assert tensor > 1 or not re.findall(r"reduce_fusion.*layer_.*dot_general", text)
    assert len(re.findall(r" fusion\(.*decode_plan", text)) == 3
    assert len(re.findall(r" or\(.*prefill_plan", text)) == (kind == "mixed")


@pytest.mark.parametrize(("kind", "tensor"), [("mixed", 1), ("decode", 2)])
def test_h200_step_that_another_process_lowered_compiles_to_the_same(kind, tensor):
    source = lowering.StepSource(
        config=json.loads(LLAMA_8B.read_text()) | {"num_hidden_layers": LAYERS},
        mesh=MeshConfig(tensor=tensor),
        platform="cuda",
        topology=lowering.describe(h200(tensor)),
        layout="tensor",
        dtype="bfloat16",
        buckets=Buckets((64,), (256,), 64, 256),
        page_size=16,
        attention="gpu",
        embeddings=False,
        settings=lowering.tracing_settings(),
    )
    [shape] = [shape for shape in source.buckets.steps() if shape.kind == kind]
    lowerers = lowering.Lowerers(source, 1)
    exported = lowerers.export(shape, 8192)
    lowerers.close()
    assert exported is not None
    runner = source.runner()
    runner.num_pages = 8192
    program = runner.step_program(shape)
    # nothing of a process shows in it: what was lowered before, or when
    again = [Exported(program.export("cuda"), 0.0) for _ in range(2)]
    texts = [program.lower(each).as_text() for each in (exported, *again)]
    assert texts[0] == texts[1] == texts[2]
    theirs, ours = program.lower(exported).compile(), program.lower().compile()

    def operations(compiled):
        """What the step runs, and how often."""
        entry = compiled.as_text().split("\nENTRY")[1]
        found = collections.Counter(re.findall(r" ([a-z][a-z-]*)\(", entry))
        del found["parameter"]  # their step has those that nothing uses, too
        return found

    assert operations(theirs) == operations(ours)
    for name in ("paged_decode", "rotate_and_write", "decode_matmul", "add_norm"):
        assert kernels(theirs.as_text(), name) == kernels(ours.as_text(), name)
    for name in ("alias_size_in_bytes", "output_size_in_bytes"):
        assert getattr(theirs.memory_analysis(), name) == getattr(ours.memory_analysis(), name)
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (theirs, ours)]
    assert temporary[0] == pytest.approx(temporary[1], rel=0.001)
    assert theirs.output_shardings == ours.output_shardings
