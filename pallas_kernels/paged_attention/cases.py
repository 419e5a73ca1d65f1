"""Shapes that tests, benches and tuning share: what real models ask of paged attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.meta import AttentionMeta, Kind


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: (query_len, kv_len) for each row, single-query rows first, and model sizes.

    It is a "decode" call where every row has `queries_per_row` queries.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    queries_per_row: int = 1
    padding_rows: int = 0
    padding_tokens: int = 0  # mixed only: a decode step has a token for each padding row

    @property
    def kind(self) -> Kind:
        uniform = all(query_len == self.queries_per_row for query_len, _ in self.rows)
        return "decode" if uniform else "mixed"

    @property
    def kv_bytes(self) -> int:
        """Bytes of cache that a call must read: each row's keys and values once."""
        window = self.sliding_window or 10**9
        tokens = sum(min(kv_len, window + query_len - 1) for query_len, kv_len in self.rows)
        return tokens * 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products over the keys that are seen."""
        window = self.sliding_window or 10**9
        seen = 0
        for query_len, kv_len in self.rows:
            position = np.arange(kv_len - query_len, kv_len)
            seen += int(np.minimum(position + 1, window).sum())
        return 4 * seen * self.num_heads * self.head_dim


def make_inputs(
    case: Case,
    seed: int = 0,
    *,
    poison: bool = False,
    table_width: int | None = None,
    on_device: bool = False,
):
    """(q, k, v, kv_pages, meta, sinks) for a case: random values on scattered pages.

    The cache already holds each row's older tokens. poison: all other cache is NaN (else random),
    and page table entries past a row's end are out of range. on_device: values come from
    jax.random instead of numpy, which is much faster for gigabytes and can't be poisoned.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    page_size, num_rows = case.page_size, len(case.rows) + case.padding_rows
    decode_rows = next(
        (i for i, (query_len, _) in enumerate(case.rows) if query_len != 1), len(case.rows)
    )
    row_tokens = sum(query_len for query_len, _ in case.rows)
    extra = (
        case.padding_rows * case.queries_per_row if case.kind == "decode" else case.padding_tokens
    )
    num_tokens = row_tokens + extra
    row_pages = [-(-kv_len // page_size) for _, kv_len in case.rows]
    num_pages = 1 + sum(row_pages) + 2
    width = table_width or max(row_pages, default=1)

    old = np.zeros(num_pages * page_size, bool)
    page_table = np.full((num_rows, width), 2**31 - 1 if poison else 0, np.int32)
    slots = np.arange(num_tokens, dtype=np.int32) % page_size  # of padding: page 0
    ids = 1 + rng.permutation(num_pages - 1)
    token = used = 0
    for row, (query_len, kv_len) in enumerate(case.rows):
        pages = ids[used : used + row_pages[row]]
        used += row_pages[row]
        page_table[row, : len(pages)] = pages
        row_slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:kv_len]
        old[row_slots[: kv_len - query_len]] = True
        slots[token : token + query_len] = row_slots[kv_len - query_len :]
        token += query_len
    query_lens = [query_len for query_len, _ in case.rows] + [0] * case.padding_rows
    kv_lens = [kv_len for _, kv_len in case.rows] + [0] * case.padding_rows
    meta = AttentionMeta(
        page_table=jnp.asarray(page_table),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32),
        slot_mapping=jnp.asarray(slots),
        num_decode_rows=jnp.int32(decode_rows),
    )

    tokens = (num_tokens, case.num_heads), (num_tokens, case.num_kv_heads)
    shapes = [(*lead, case.head_dim) for lead in (tokens[0], tokens[1], tokens[1])]
    shapes += [(num_pages, page_size, 2 * case.num_kv_heads, case.head_dim), (case.num_heads,)]
    if on_device:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        arrays = [
            jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
        ]
    else:
        arrays = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]
        if poison:
            arrays[3].reshape(len(old), -1)[~old] = np.nan
    q, k, v, kv_pages, sinks = map(jnp.asarray, arrays)
    return q, k, v, kv_pages, meta, sinks if case.sinks else None


LLAMA_8B: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2_135M: dict[str, Any] = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "float32",
}
QWEN3_14B: dict[str, Any] = {"num_heads": 40, "num_kv_heads": 8, "head_dim": 128}
GEMMA2_9B: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "soft_cap": 50.0}
GPT_OSS_20B: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "sinks": True}
PHI3_MINI: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 96}
MISTRAL_7B: dict[str, Any] = {**LLAMA_8B, "sliding_window": 4096}

CASES: tuple[Case, ...] = (
    Case("smollm2-decode-1", ((1, 300),), **SMOLLM2_135M),
    Case("smollm2-decode-16", ((1, 300),) * 16, **SMOLLM2_135M),
    Case("smollm2-chunk-256", ((256, 1256),), **SMOLLM2_135M),
    Case("smollm2-mixed", ((1, 300),) * 15 + ((200, 712), (41, 41)), **SMOLLM2_135M),
    Case("llama8b-decode-1-short", ((1, 300),), **LLAMA_8B),
    Case("llama8b-decode-1-32k", ((1, 32768),), **LLAMA_8B),
    Case("llama8b-decode-32-1k", ((1, 1024),) * 32, **LLAMA_8B),
    Case("llama8b-decode-64-4k", ((1, 4096),) * 64, **LLAMA_8B),
    Case("llama8b-decode-64-4k-page64", ((1, 4096),) * 64, **LLAMA_8B, page_size=64),
    Case("llama8b-decode-256-1k", ((1, 1024),) * 256, **LLAMA_8B),
    Case("llama8b-decode-256-500", ((1, 500),) * 256, **LLAMA_8B),
    Case("llama8b-decode-64-264", ((1, 264),) * 64, **LLAMA_8B),
    Case("llama8b-decode-256-264", ((1, 264),) * 256, **LLAMA_8B),
    Case("llama8b-decode-32-8k", ((1, 8192),) * 32, **LLAMA_8B),
    Case("llama8b-decode-ragged", ((1, 32768),) + ((1, 500),) * 63, **LLAMA_8B),
    Case("qwen3-decode-64-2k", ((1, 2048),) * 64, **QWEN3_14B),
    Case("gemma2-decode-32-4k", ((1, 4096),) * 32, **GEMMA2_9B),
    Case("gemma2-local-32-8k", ((1, 8192),) * 32, **GEMMA2_9B, sliding_window=4096),
    Case("gptoss-decode-64-2k", ((1, 2048),) * 64, **GPT_OSS_20B),
    Case("gptoss-local-64-2k", ((1, 2048),) * 64, **GPT_OSS_20B, sliding_window=128),
    Case("mistral-decode-32-8k", ((1, 8192),) * 32, **MISTRAL_7B),
    Case("llama8b-verify4-64-4k", ((4, 4096),) * 64, **LLAMA_8B, queries_per_row=4),
    Case("llama8b-verify8-1-32k", ((8, 32768),), **LLAMA_8B, queries_per_row=8),
    Case("phi3-decode-64-2k", ((1, 2048),) * 64, **PHI3_MINI),
    Case("llama8b-prefill-8k", ((8192, 8192),), **LLAMA_8B),
    Case("llama8b-chunk-2k-of-10k", ((2048, 10240),), **LLAMA_8B),
    Case("llama8b-mixed", ((1, 1024),) * 64 + ((1024, 1024), (960, 3008)), **LLAMA_8B),
)
