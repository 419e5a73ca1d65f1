"""Paged attention on a Hopper GPU, by Pallas Mosaic GPU kernels: `gpu_decode` for rows with one or
a few queries, `gpu_prefill` for rows with chunks, or where that can't do the case
`reference.attend_chunks`, which XLA compiles for the GPU.
"""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.kernel_names import leave_out_numbers
from pallas_kernels.paged_attention import gpu_decode, gpu_prefill, reference
from pallas_kernels.paged_attention.gpu_decode import unsupported as unsupported
from pallas_kernels.paged_attention.meta import AttentionMeta, AttentionSpec, Kind

leave_out_numbers()


def early_inputs(meta: AttentionMeta, spec: AttentionSpec, device_kind: str) -> tuple[Array, ...]:
    """What `attend` with `reads_early` reads, the cache apart, before the kernel ahead has ended:
    to be given to that one."""
    if spec.kind != "decode" or unsupported(spec):
        return ()
    return gpu_decode.early_inputs(
        meta.page_table, meta.kv_lens, spec, gpu_decode.default_config(spec, device_kind)
    )


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
    device_kind: str = "",
    config: gpu_decode.Config | None = None,
    reads_early: bool = False,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """As `reference.attend`. Raises NotImplementedError naming what the kernel can't do.

    reads_early: whether a "decode" call may start to read before the kernel ahead has ended, see
    `gpu_decode`.
    device_kind: whose tuned settings to use; config: settings of the decode kernel instead.
    interpret: Pallas's `InterpretGPUParams`, to run on a CPU.
    """
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
            f"the GPU kernel of paged attention can't do {reason}; impl='reference' can"
        )
    options = {
        "config": config or gpu_decode.default_config(spec, device_kind),
        "interpret": interpret,
    }
    rows = functools.partial(gpu_decode.attend_rows, reads_early=reads_early, **options)
    rows_in_place = chunks = None
    assert kind == "decode" or not reads_early
    if kind == "mixed" and gpu_decode.in_place(spec, interpreted=interpret is not None):
        rows_in_place = functools.partial(gpu_decode.attend_rows_in_place, **options)
    if kind == "mixed" and gpu_prefill.unsupported(spec) is None:
        chunks = functools.partial(
            gpu_prefill.attend_chunks,
            config=dataclasses.replace(
                gpu_prefill.default_config(spec), interpretable=interpret is not None
            ),
            interpret=interpret,
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
        rows_in_place=rows_in_place,
        chunks_kernel=chunks,
    )
