"""The GPU kernels of paged attention against the reference, on the card, case by case.

Run: python -m bench.kernel_numerics [--cases REGEX]
Cache that holds no token is NaN. Exits with 1 where a difference is over what 16-bit outputs round.
"""

import argparse
import re

import jax
import jax.numpy as jnp

from bench import record
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs

CALLS = 4
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}
ROWS = ((1, 700), (1, 33), (1, 1), (1, 4097), (1, 64))
CHUNKS = ((1, 700), (1, 33), (300, 1000), (5, 5), (129, 640))
CASES = [
    *(
        Case(f"decode, {heads} heads over {kv_heads}, width {width}", ROWS, heads, kv_heads, width,
             padding_rows=2)
        for heads, kv_heads, width in (
            (8, 8, 128), (16, 8, 128), (9, 3, 64), (32, 8, 128), (20, 4, 128), (14, 2, 64),
            (20, 2, 128), (16, 1, 128), (8, 4, 256), (64, 1, 128), (32, 32, 96), (8, 4, 160),
            (16, 2, 32),
        )
    ),
    Case("decode, page 64, f16", ROWS, 32, 8, 128, page_size=64, dtype="float16"),
    Case("decode, window", ROWS, 32, 8, 128, sliding_window=100),
    Case("decode, soft cap and sinks", ROWS, 64, 8, 64, soft_cap=30.0, sinks=True),
    *(
        Case(f"decode, {queries} new tokens, {heads} heads over 8, width {width}",
             tuple((queries, n) for n in (700, 33, 8, 4097, 64)), heads, 8, width, padding_rows=2,
             queries_per_row=queries, sliding_window=window)
        for queries, heads, width, window in (
            (2, 8, 128, None), (4, 32, 128, None), (8, 64, 64, None), (8, 32, 128, 100),
            (5, 32, 96, None),
        )
    ),
    Case("decode, one row of 32k", ((1, 32768),), 32, 8, 128),
    Case("decode, a long row among short", ((1, 32768),) + ((1, 500),) * 63, 32, 8, 128),
    Case("decode, 256 rows", ((1, 300),) * 256, 64, 8, 64),
    Case("mixed", CHUNKS, 32, 8, 128, padding_rows=2, padding_tokens=9),
    Case("mixed, 9 heads over 3", CHUNKS, 9, 3, 64, padding_tokens=1),
    Case("mixed, window", CHUNKS, 32, 8, 128, sliding_window=200),
    Case("mixed, soft cap and sinks, page 128", CHUNKS, 32, 8, 128, soft_cap=30.0, sinks=True,
         page_size=128),
]  # fmt: skip


def difference(case: Case) -> float:
    """The largest of several calls one after the other, which share a plan."""
    q, k, v, kv_pages, meta, sinks = make_inputs(case, poison=True)
    options = {
        "sm_scale": case.head_dim**-0.5,
        "kind": case.kind,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
    }
    expected, _ = paged_attention(q, k, v, kv_pages, meta, **options)

    @jax.jit
    def calls(q, k, v, kv_pages, meta):
        outs = []
        for _ in range(CALLS):
            out, kv_pages = paged_attention(q, k, v, kv_pages, meta, impl="gpu", **options)
            # Bit by bit the same, though the compiler doesn't know.
            q = jnp.where(jnp.isnan(out), out, q)
            outs.append(out)
        return jnp.stack(outs)

    out = calls(q, k, v, kv_pages, meta)
    return float(jnp.max(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="those whose name has this, a regex")
    arguments = parser.parse_args()
    found = {}
    for case in CASES:
        if not re.search(arguments.cases, case.name):
            continue
        found[case.name] = difference(case)
        print(f"{case.name}: {found[case.name]:.5f}", flush=True)
    ran = [case for case in CASES if case.name in found]
    worst = [case.name for case in ran if not found[case.name] <= TOLERANCE[case.dtype]]
    record.store("kernel_numerics", "NVIDIA H200", {"largest difference": found})
    if worst:
        raise SystemExit(f"too far from the reference: {', '.join(worst)}")


if __name__ == "__main__":
    main()
