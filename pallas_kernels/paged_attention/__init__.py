"""Attention over a paged KV cache: write a step's keys and values, then attend to all cached."""

from pallas_kernels.paged_attention.api import (
    IMPLEMENTATIONS,
    AttentionMeta,
    AttentionSpec,
    paged_attention,
    write_kv,
)

__all__ = ["IMPLEMENTATIONS", "AttentionMeta", "AttentionSpec", "paged_attention", "write_kv"]
