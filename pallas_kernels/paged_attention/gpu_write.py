"""Writes a step's keys and values to their pages on a Hopper GPU: a Pallas Mosaic GPU kernel.

XLA's scatter moves element by element: 37 us a layer for 2,048 tokens of 4 KiB (H200, JAX 0.11.2).
Here a thread block takes some tokens, which lie together, and sends each to its slot in one copy.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from pallas_kernels.early_launch import allow_next, wait_for_inputs

plgpu: Any = mosaic_gpu

MAX_BLOCK_BYTES = 64 << 10


def unsupported(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: Any) -> str | None:
    """Why the kernel can't do a case, or doesn't pay, or None where it does."""
    if num_tokens == 1:
        return "one token, which XLA updates in place"
    if head_dim % 64 or head_dim > 256 or num_kv_heads > 128:
        return f"{num_kv_heads} kv heads of width {head_dim}"
    return None if jnp.dtype(dtype).itemsize == 2 else f"a cache of {dtype}"


def write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    slot_mapping: Int[Array, "T"],
    early_inputs: Sequence[Array] = (),
    *,
    interpret: Any = None,
) -> Float[Array, "pages page_size 2*K H"]:
    """As `reference.write_kv`. early_inputs: what the attention behind this reads before it waits
    (see `gpu_decode`)."""
    num_tokens, num_kv_heads, head_dim = k.shape
    dtype = kv_pages.dtype
    kv = jnp.stack((k, v), axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim).astype(dtype)
    token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
    tokens = max(1, min(MAX_BLOCK_BYTES // token_bytes, pl.cdiv(num_tokens, 132)))
    while num_tokens % tokens:
        tokens -= 1
    pages_ref = jax.new_ref(kv_pages)
    write: Any = pl.kernel(
        functools.partial(_in_scope, pages_ref=pages_ref, tokens=tokens, interpret=interpret),
        mesh=plgpu.Mesh(grid=(num_tokens // tokens,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="write_kv",
        **({"interpret": interpret} if interpret is not None else {}),
    )
    write(kv, slot_mapping, *early_inputs)
    return jax.freeze(pages_ref)


def _in_scope(kv_ref, slots_ref, *_, pages_ref, tokens, interpret):
    wait_for_inputs(interpret)
    allow_next(interpret)  # not before: what the next one reads early must be there
    pl.run_scoped(
        functools.partial(_write, kv_ref, slots_ref, pages_ref, tokens),
        plgpu.SMEM((tokens, *kv_ref.shape[1:]), kv_ref.dtype),
        plgpu.Barrier(),
    )


def _write(kv_ref, slots_ref, pages_ref, tokens, smem, loaded):
    first = lax.axis_index("block") * tokens
    plgpu.copy_gmem_to_smem(kv_ref.at[pl.ds(first, tokens)], smem, loaded)
    plgpu.barrier_wait(loaded)
    page_size = jnp.int32(pages_ref.shape[1])

    def send(i, _):
        slot = slots_ref[first + i]
        plgpu.copy_smem_to_gmem(
            smem.at[i], pages_ref.at[lax.div(slot, page_size), lax.rem(slot, page_size)]
        )
        return ()

    lax.fori_loop(0, tokens, send, ())
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
