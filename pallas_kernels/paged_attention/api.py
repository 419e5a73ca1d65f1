"""Paged attention: the one call that layers make, whatever the device."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.meta import AttentionMeta, AttentionSpec, Kind
from pallas_kernels.paged_attention.reference import write_kv

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMeta",
    "AttentionSpec",
    "paged_attention",
    "rotate_and_write",
    "write_kv",
]

Implementation = Literal["reference", "tpu", "gpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "tpu", "gpu")


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    sm_scale: float,
    kind: Kind,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    impl: Implementation = "reference",
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "pages page_size 2*K H"]]:
    """Writes a step's keys and values into the cache, then attends to all that is cached. None:
    the cache has them already (see `rotate_and_write`).

    Query i of a row sits at position kv_len - query_len + i and sees cached tokens up to itself:
    with `sliding_window` only the newest that many (itself counted); with `soft_cap` scores become
    soft_cap * tanh(score / soft_cap); with `sinks` each head's softmax has one more logit that
    carries no value. Softmax is in float32, the output in q's dtype. Padding rows and tokens give
    zeros. Cache that holds no token may be NaN and is never mixed in.

    kind: "decode": T == S Q, tokens s Q to (s + 1) Q - 1 are the queries of row s; Q is 1, or up to
      8 where proposed tokens are verified. No row sees another's new tokens. "mixed": any `meta`.
    kv_pages: K of kv head h at 2h, V at 2h + 1. Updated in place when the enclosing jit is given it
      to keep (donated); use only the returned array afterwards.
    mesh: when its axis "tensor" has more than one device, heads are spread over that axis (q, k, v
      on axis 1, kv_pages on axis 2, sinks on axis 0), everything else is on each device, and each
      device attends with its own heads. None: the compiler places a "reference" call by itself.
    impl: "tpu" and "gpu" are kernels; what they leave to the reference is compiled by XLA.
      `dispatch.choose` says which to use.
    interpret: run the TPU or GPU kernel's body on any device, slowly, for tests.
    Raises ValueError for shapes that contradict each other, NotImplementedError for what `impl`
    can't do.
    """
    spec = _check(q, k, v, kv_pages, meta, kind, sliding_window, soft_cap, sinks)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    device_kind = "" if mesh is None else mesh.devices.flat[0].device_kind
    if mesh is None or mesh.shape.get("tensor", 1) == 1:
        return _call(q, k, v, kv_pages, meta, sinks, sm_scale, spec, impl, device_kind, interpret)
    shards = mesh.shape["tensor"]
    if spec.num_kv_heads % shards:
        raise ValueError(f"{spec.num_kv_heads} kv heads can't be spread over {shards} devices")
    local = functools.partial(
        _call,
        sm_scale=sm_scale,
        spec=spec.shard(shards),
        impl=impl,
        device_kind=device_kind,
        interpret=interpret,
    )
    heads, pages, same = (
        PartitionSpec(None, "tensor"),
        PartitionSpec(None, None, "tensor"),
        PartitionSpec(),
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, same, PartitionSpec("tensor")),
        out_specs=(heads, pages),
        check_vma=False,
    )(q, k, v, kv_pages, meta, sinks)


def rotate_and_write(
    qkv: Float[Array, "S T K G2 H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    kind: Kind,
    sliding_window: int | None,
    impl: Implementation,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "pages page_size 2*K H"]] | None:
    """Queries with their positions turned in, and the cache with the tokens' keys, turned too, and
    values. qkv: parts whose sum it is; of each kv head its queries, key and value. kind,
    sliding_window: of the `paged_attention` that follows.

    None where `impl` has no kernel that does both at once; otherwise as for `paged_attention`, to
    which the keys and values are then not given.
    """
    if impl != "gpu" or (mesh is not None and mesh.size > 1):
        return None
    from pallas_kernels.paged_attention import gpu_rotate

    if gpu_rotate.unsupported(qkv.shape, kv_pages.dtype):
        return None
    _, num_tokens, num_kv_heads, members, head_dim = qkv.shape
    spec = AttentionSpec(
        kind=kind,
        num_heads=num_kv_heads * (members - 2),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=kv_pages.shape[1],
        kv_dtype=kv_pages.dtype.name,
        sliding_window=sliding_window,
        queries_per_row=num_tokens // len(meta.kv_lens) if kind == "decode" else 1,
    )
    device_kind = "" if mesh is None else mesh.devices.flat[0].device_kind
    return _rotate_and_write(qkv, cos, sin, kv_pages, meta, spec, device_kind, interpret)


# Behind a jit of its own, so that a model's layers share one trace and one lowered kernel.
@functools.partial(jax.jit, static_argnames=("spec", "device_kind", "interpret"))
def _rotate_and_write(qkv, cos, sin, kv_pages, meta, spec, device_kind, interpret):
    from jax.experimental.pallas import mosaic_gpu

    from pallas_kernels.paged_attention import gpu, gpu_rotate

    params = mosaic_gpu.InterpretGPUParams() if interpret else None
    early = gpu.early_inputs(meta, spec, device_kind)
    return gpu_rotate.rotate_and_write(
        qkv, cos, sin, kv_pages, meta.slot_mapping, early, interpret=params
    )


# Behind a jit of its own, so that a model's layers share one trace and one lowered kernel.
@functools.partial(
    jax.jit, static_argnames=("sm_scale", "spec", "impl", "device_kind", "interpret")
)
def _call(q, k, v, kv_pages, meta, sinks, sm_scale, spec, impl, device_kind, interpret):
    options = {
        "sm_scale": sm_scale,
        "kind": spec.kind,
        "sliding_window": spec.sliding_window,
        "soft_cap": spec.soft_cap,
        "sinks": sinks,
    }
    if impl == "gpu":
        from jax.experimental.pallas import mosaic_gpu

        from pallas_kernels.paged_attention import gpu, gpu_write

        params = mosaic_gpu.InterpretGPUParams() if interpret else None
        reads_early = spec.kind == "decode"
        if k is not None:
            if gpu_write.unsupported(*k.shape, dtype=kv_pages.dtype) is None:
                early = gpu.early_inputs(meta, spec, device_kind)
                kv_pages = gpu_write.write_kv(
                    k, v, kv_pages, meta.slot_mapping, early, interpret=params
                )
            else:
                kv_pages = write_kv(k, v, kv_pages, meta.slot_mapping)
                reads_early = False
        out = gpu.attend(
            q,
            kv_pages,
            meta,
            device_kind=device_kind,
            reads_early=reads_early,
            interpret=params,
            **options,
        )
        return out, kv_pages
    if k is not None:
        kv_pages = write_kv(k, v, kv_pages, meta.slot_mapping)
    if impl == "tpu":
        from pallas_kernels.paged_attention import tpu

        out = tpu.attend(q, kv_pages, meta, interpret=interpret, **options)
    else:
        out = reference.attend(q, kv_pages, meta, **options)
    return out, kv_pages


def _check(q, k, v, kv_pages, meta, kind, sliding_window, soft_cap, sinks) -> AttentionSpec:
    """Raises ValueError where shapes or options contradict each other."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_pages.shape[2] // 2
    num_rows = len(meta.kv_lens)
    wrong = []

    def require(holds: bool, message: str) -> None:
        if not holds:
            wrong.append(message)

    require(kind in ("decode", "mixed"), f"kind is {kind!r}; allowed: decode, mixed")
    require((k is None) == (v is None), "k and v come together")
    if k is not None and v is not None:
        require(k.shape == (num_tokens, num_kv_heads, head_dim), f"k is {k.shape}, q {q.shape}")
        require(v.shape == k.shape, f"v is {v.shape}, k {k.shape}")
    require(num_heads % num_kv_heads == 0, f"{num_heads} heads for {num_kv_heads} kv heads")
    require(
        kv_pages.ndim == 4 and kv_pages.shape[2:] == (2 * num_kv_heads, head_dim),
        f"kv_pages is {kv_pages.shape}, q {q.shape}",
    )
    require(
        jnp.issubdtype(kv_pages.dtype, jnp.floating) and kv_pages.dtype.itemsize in (2, 4),
        f"kv_pages is {kv_pages.dtype}; allowed: bfloat16, float16, float32",
    )
    require(meta.slot_mapping.shape == (num_tokens,), f"slots {meta.slot_mapping.shape}")
    require(meta.page_table.shape[:1] == (num_rows,), f"page_table {meta.page_table.shape}")
    require(meta.query_start.shape == (num_rows + 1,), f"query_start {meta.query_start.shape}")
    queries_per_row = 1
    if kind == "decode":
        queries_per_row = num_tokens // max(num_rows, 1)
        require(
            num_tokens == num_rows * queries_per_row and queries_per_row in range(1, 9),
            f"decode: {num_tokens} tokens for {num_rows} rows; allowed: 1 to 8 each",
        )
    require(sliding_window is None or sliding_window > 0, f"sliding_window is {sliding_window}")
    require(soft_cap is None or soft_cap > 0, f"soft_cap is {soft_cap}")
    require(sinks is None or sinks.shape == (num_heads,), "sinks: one a head")
    if wrong:
        raise ValueError("; ".join(wrong))
    return AttentionSpec(
        kind=kind,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=kv_pages.shape[1],
        kv_dtype=kv_pages.dtype.name,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        queries_per_row=queries_per_row,
    )
