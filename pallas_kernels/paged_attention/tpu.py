"""Paged attention on a TPU: a Pallas kernel for rows with one query, XLA for chunks.

In a "mixed" call rows from `num_decode_rows` on go through `reference.attend_chunks`, which XLA
compiles for the TPU; a kernel for them is still to be written. A decode call must read
kv_len x 2 K H elements a row; no rate is claimed, since this has not run on a TPU yet (it compiles
for v5e, v6e and v7x, and its numbers are checked in Pallas's interpreter).

One grid step is one row. Its pages come from HBM a block at a time, all heads of a page in one DMA,
the next block's DMAs in flight while this one is computed:

    page_table row   [p0 p1 | p2 p3 | p4 .. ]       pages_per_block = 2
    buffer slot          0       1       0          a slot is refilled once its block is consumed
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.meta import AttentionMeta, AttentionSpec, Kind

LANES = 128
BUFFER_BYTES = 4 << 20  # of VMEM for both slots; 16 MiB is the least that a TPU gives a kernel


@dataclasses.dataclass(frozen=True)
class Config:
    """How much of the cache is in flight."""

    pages_per_block: int

    def __post_init__(self):
        if self.pages_per_block < 1:
            raise ValueError(f"pages_per_block is {self.pages_per_block}; allowed: 1 or more")


def default_config(spec: AttentionSpec) -> Config:
    """About 256 tokens a block, fewer where both slots of that would not fit."""
    page_bytes = (
        spec.page_size * 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(spec.kv_dtype).itemsize
    )
    fitting = BUFFER_BYTES // (2 * page_bytes)
    return Config(max(1, min(256 // spec.page_size, fitting)))


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernel can't do a case, or None where it can."""
    if spec.head_dim % LANES:
        return f"head width {spec.head_dim} (a multiple of {LANES} is needed)"
    if spec.queries_per_row > 1:
        return f"{spec.queries_per_row} queries a row (1 works)"
    if spec.kv_dtype not in ("bfloat16", "float32"):
        return f"a {spec.kv_dtype} cache (bfloat16 and float32 work)"
    if spec.page_size % 8:
        return f"page size {spec.page_size} (a multiple of 8 is needed)"
    return None


def attend(
    q: Float[Array, "T N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    meta: AttentionMeta,
    *,
    sm_scale: float,
    kind: Kind,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """As `reference.attend`. Raises NotImplementedError naming what the kernel can't do."""
    spec = AttentionSpec(
        kind=kind,
        num_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[2] // 2,
        head_dim=q.shape[2],
        page_size=kv_pages.shape[1],
        kv_dtype=kv_pages.dtype.name,
        queries_per_row=len(q) // len(meta.kv_lens) if kind == "decode" else 1,
    )
    if reason := unsupported(spec):
        raise NotImplementedError(
            f"the TPU kernel of paged attention can't do {reason}; impl='reference' can"
        )
    rows = functools.partial(
        attend_rows, config=config or default_config(spec), interpret=interpret
    )
    return reference.attend(
        q,
        kv_pages,
        meta,
        sm_scale=sm_scale,
        kind=kind,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        rows_kernel=rows,
    )


def attend_rows(
    q: Float[Array, "S N H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    page_table: Int[Array, "S P"],
    kv_lens: Int[Array, "S"],
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
    config: Config,
    interpret: bool = False,
) -> Float[Array, "S N H"]:
    """One query a row, each its sequence's newest token. Zeros for rows of length 0."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_parts, _ = kv_pages.shape
    num_kv_heads = num_parts // 2
    group = num_heads // num_kv_heads
    block = config.pages_per_block * page_size

    def row_block(s, *_):
        return (s, 0, 0)

    operands = [q]
    in_specs = [pl.BlockSpec((1, num_heads, head_dim), row_block)]
    if sinks is not None:
        operands.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (num_heads, LANES)))
        in_specs.append(pl.BlockSpec((num_heads, LANES), lambda s, *_: (0, 0)))
    kernel = functools.partial(
        _row_kernel,
        has_sinks=sinks is not None,
        pages_per_block=config.pages_per_block,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    state = pltpu.VMEM((num_kv_heads, group, LANES), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows,),
            in_specs=[*in_specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, num_heads, head_dim), row_block),
            scratch_shapes=[
                pltpu.VMEM((2, block, num_parts, head_dim), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((num_kv_heads, group, head_dim), jnp.float32),
                state,
                state,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention_rows",
    )(kv_lens, page_table, *operands, kv_pages)


def _row_kernel(
    lens_ref,
    pages_ref,
    q_ref,
    *refs,
    has_sinks: bool,
    pages_per_block: int,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
):
    """refs: [sinks,] kv in HBM, out, two slots of KV, their semaphores, and the running output,
    maximum and sum of weights (the last two the same in every lane)."""
    sinks_ref = refs[0] if has_sinks else None
    kv_ref, out_ref, slots, arrived, acc_ref, top_ref, total_ref = refs[has_sinks:]
    row = pl.program_id(0)
    block = slots.shape[1]
    page_size = block // pages_per_block
    num_kv_heads, group, _ = acc_ref.shape
    precision = lax.Precision.HIGHEST if kv_ref.dtype == jnp.float32 else None
    length = lens_ref[row]
    oldest = jnp.int32(0) if sliding_window is None else jnp.maximum(length - sliding_window, 0)
    first, end = oldest // block, pl.cdiv(length, block)

    def each_page(index, slot, do):
        for j in range(pages_per_block):
            entry = index * pages_per_block + j

            @pl.when(entry * page_size < length)
            def _(j=j, entry=entry):
                do(
                    pltpu.make_async_copy(
                        kv_ref.at[pages_ref[row, entry]],
                        slots.at[slot, pl.ds(j * page_size, page_size)],
                        arrived.at[slot],
                    )
                )

    acc_ref[...] = jnp.zeros_like(acc_ref)
    if sinks_ref is None:
        top_ref[...] = jnp.full_like(top_ref, reference.MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
    else:  # a key that was seen before all others and carries no value
        for head in range(num_kv_heads):
            top_ref[head] = sinks_ref[head * group : (head + 1) * group, :]
        total_ref[...] = jnp.ones_like(total_ref)

    @pl.when(length > 0)
    def _():
        each_page(first, lax.rem(first, 2), lambda copy: copy.start())

    @pl.loop(first, end)
    def _(index):
        slot = lax.rem(index, 2)

        @pl.when(index + 1 < end)
        def _():
            each_page(index + 1, 1 - slot, lambda copy: copy.start())

        each_page(index, slot, lambda copy: copy.wait())
        # Rows of the slot that no page filled hold whatever was there before, even NaN.
        position = index * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        seen = (position < length) & (position >= oldest)
        filled = index * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0) < length
        for head in range(num_kv_heads):
            q = q_ref[0, head * group : (head + 1) * group, :].astype(kv_ref.dtype)
            k = slots[slot, :, 2 * head, :]
            v = jnp.where(filled, slots[slot, :, 2 * head + 1, :], 0)
            scores = lax.dot_general(
                q,
                k,
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = scores * sm_scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(seen, scores, reference.MASKED)
            top = jnp.maximum(top_ref[head], scores.max(1, keepdims=True))
            keep = jnp.exp(top_ref[head] - top)
            weights = jnp.exp(scores - top[:, :1])
            top_ref[head] = top
            total_ref[head] = total_ref[head] * keep + weights.sum(1, keepdims=True)
            acc_ref[head] = acc_ref[head] * keep[:, :1] + jnp.dot(
                weights.astype(v.dtype),
                v,
                precision=precision,
                preferred_element_type=jnp.float32,
            )

    for head in range(num_kv_heads):
        total = total_ref[head][:, :1]
        out = acc_ref[head] / jnp.where(total > 0, total, 1)
        out_ref[0, head * group : (head + 1) * group, :] = out.astype(out_ref.dtype)
