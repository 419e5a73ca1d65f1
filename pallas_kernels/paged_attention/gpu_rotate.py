"""Turns a step's queries and keys by their positions (RoPE, arXiv:2104.09864) and writes keys and
values to their pages on a Hopper GPU: a Pallas Mosaic GPU kernel.

XLA makes a kernel for the turning and one for the writing; between a decode step's kernels of our
own, each waits for the one ahead to have ended before it is even launched (see `early_launch`).
Here a thread block takes one kv head of one token, with its queries, as the product with the
weights left them: in float32 parts to be added up (see `decode_matmul`).
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

LANES = 128  # threads of a warpgroup
SMEM_ALIGNMENT = 128  # bytes, of what a copy moves


def unsupported(shape: Sequence[int], dtype: Any) -> str | None:
    """Why the kernel can't do qkv of a shape [S, T, K, G+2, H] with a cache of `dtype`, or None
    where it can."""
    *_, members, head_dim = shape
    half = head_dim // 2
    if half * 2 % SMEM_ALIGNMENT or members * half % LANES:
        return f"{members - 2} heads of width {head_dim} a kv head"
    return None if jnp.dtype(dtype).itemsize == 2 else f"a cache of {dtype}"


def rotate_and_write(
    qkv: Float[Array, "S T K G2 H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    kv_pages: Float[Array, "pages page_size 2*K H"],
    slot_mapping: Int[Array, "T"],
    early_inputs: Sequence[Array] = (),
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "pages page_size 2*K H"]]:
    """Turned queries, and the pages with turned keys and with values in them, as
    `reference.write_kv` has them.

    qkv: parts whose sum it is, which is rounded to the cache's dtype; of each kv head its queries,
    key and value. early_inputs: what the attention behind this reads before it waits (see
    `gpu_decode`).
    """
    _, num_tokens, num_kv_heads, members, head_dim = qkv.shape
    dtype = kv_pages.dtype
    pages_ref = jax.new_ref(kv_pages)
    rotate: Any = pl.kernel(
        functools.partial(_in_scope, pages_ref=pages_ref, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_kv_heads, members - 2, head_dim), dtype),
        mesh=plgpu.Mesh(grid=(num_tokens, num_kv_heads), grid_names=("token", "head")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="rotate_and_write",
        **({"interpret": interpret} if interpret is not None else {}),
    )
    q = rotate(qkv, _table(cos, sin, members), slot_mapping, *early_inputs)
    return q.reshape(num_tokens, -1, head_dim), jax.freeze(pages_ref)


def _table(cos: Array, sin: Array, members: int) -> Float[Array, "T 2 G+2 half"]:
    """Cosines and sines of each member of a kv head: a value is turned by nothing."""
    turns = jnp.stack([cos, sin], axis=1)[:, :, None]
    none = jnp.zeros_like(turns).at[:, 0].set(1)
    return jnp.concatenate([turns] * (members - 1) + [none], axis=2)


def _in_scope(qkv_ref, table_ref, slots_ref, *refs, pages_ref, interpret):
    *_, q_ref = refs
    wait_for_inputs(interpret)
    allow_next(interpret)  # not before: what the next one reads early must be there
    num_parts, _, _, members, head_dim = qkv_ref.shape
    pl.run_scoped(
        functools.partial(_rotate, qkv_ref, table_ref, slots_ref, q_ref, pages_ref),
        plgpu.SMEM((num_parts, 2, members, head_dim // 2), qkv_ref.dtype),
        plgpu.SMEM((2, members, head_dim // 2), q_ref.dtype),
        plgpu.Barrier(num_arrivals=2 * num_parts),
    )


def _rotate(qkv_ref, table_ref, slots_ref, q_ref, pages_ref, qkv_smem, out_smem, loaded):
    token, head = lax.axis_index("token"), lax.axis_index("head")
    num_parts, _, members, half = qkv_smem.shape
    group = members - 2
    columns = [pl.ds(side * half, half) for side in range(2)]
    for part in range(num_parts):
        for side in range(2):
            plgpu.copy_gmem_to_smem(
                qkv_ref.at[part, token, head, :, columns[side]], qkv_smem.at[part, side], loaded
            )
    cos, sin = table_ref[token, 0], table_ref[token, 1]
    page_size, slot = jnp.int32(pages_ref.shape[1]), slots_ref[token]
    page, place = lax.div(slot, page_size), lax.rem(slot, page_size)
    plgpu.barrier_wait(loaded)
    sides = []
    for side in range(2):
        x = qkv_smem[0, side].astype(jnp.float32)
        for part in range(1, num_parts):
            x = x + qkv_smem[part, side].astype(jnp.float32)
        sides.append(x.astype(out_smem.dtype).astype(jnp.float32))
    first, second = sides
    out_smem[0] = (first * cos - second * sin).astype(out_smem.dtype)
    out_smem[1] = (second * cos + first * sin).astype(out_smem.dtype)
    plgpu.commit_smem()
    for side in range(2):
        plgpu.copy_smem_to_gmem(
            out_smem.at[side, pl.ds(0, group)], q_ref.at[token, head, :, columns[side]]
        )
        plgpu.copy_smem_to_gmem(
            out_smem.at[side, pl.ds(group, 2)],
            pages_ref.at[page, place, pl.ds(2 * head, 2), columns[side]],
        )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
