"""The GPU kernel for chunks in Pallas's GPU interpreter, and the plan that it follows.

The interpreter can hang after an error, so it runs in a process of its own, once for all cases.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import AttentionMeta, AttentionSpec, gpu_prefill, reference
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.gpu_prefill import TILE, Config, make_plan, max_tiles

# The output's own rounding at magnitudes up to 4, and weights rounded to the same type.
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}
UNTOUCHED = 7
DETECT_RACES = "short rows"

ROWS = ((1, 30), (70, 200), (5, 5), (130, 133))
WIDE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128}
NARROW = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64}
THREES = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 64, "dtype": "float16"}
INTERPRETED = (
    (Case("grouped", ROWS[:3], **WIDE, padding_rows=1, padding_tokens=5), {}),
    (Case("one after the other", ROWS, **NARROW), {"overlap": False, "take_turns": False}),
    (Case(DETECT_RACES, ((2, 128), (9, 150), (2, 64)), **NARROW), {"stages": 3}),
    (
        Case("window", ((1, 9), (70, 300), (20, 500), (3, 3)), **NARROW, sliding_window=50),
        {"block_kv": 64, "stages": 3},
    ),
    (
        Case(
            "window, cap and sinks",
            ((70, 300), (140, 400)),
            **THREES,
            page_size=128,
            sliding_window=130,
            soft_cap=3.0,
            sinks=True,
        ),
        {},
    ),
)


def interpret(case: Case, settings: dict) -> dict:
    """Runs a case; its largest error, whether other tokens stayed, and races seen."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q, k, v, kv_pages, meta, sinks = make_inputs(case, poison=True)
    kv_pages = reference.write_kv(k, v, kv_pages, meta.slot_mapping)
    options = {
        "sm_scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
    }
    before = jnp.full_like(q, UNTOUCHED)
    races = case.name == DETECT_RACES

    @jax.jit
    def attend(q, before, kv_pages, meta):
        return gpu_prefill.attend_chunks(
            q,
            before,
            kv_pages,
            meta,
            config=Config(**settings, num_blocks=2, interpretable=True),
            interpret=plgpu.InterpretGPUParams(detect_races=races),
            **options,
        )

    out = np.asarray(attend(q, before, kv_pages, meta), np.float32)
    found = bool(interpret_pallas_call.get_races().races_found) if races else False
    wide = (a.astype(jnp.float32) for a in (q, before, kv_pages))
    expected = np.asarray(reference.attend_chunks(*wide, meta, **options))
    first = int(meta.query_start[meta.num_decode_rows])
    end = int(meta.query_start[-1])
    return {
        "error": float(np.abs(out - expected)[first:end].max()),
        "rest": bool((out[:first] == UNTOUCHED).all() and (out[end:] == UNTOUCHED).all()),
        "races": found,
    }


@pytest.fixture(scope="module")
def interpreted() -> dict:
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [case for case, _ in INTERPRETED], ids=lambda case: case.name)
def test_interpreted_kernel_equals_reference(interpreted, case):
    result = interpreted[case.name]
    assert result["error"] < TOLERANCE[case.dtype]
    assert result["rest"]
    assert not result["races"]


MOST_ROWS, MOST_TOKENS = 20, 2816


@functools.partial(jax.jit, static_argnums=1)
def jitted_plan(meta, num_tokens):
    return make_plan(meta, num_tokens)


def plan_of(query_lens, num_decode_rows, old):
    """Plan of rows with `old` cached tokens each, without its padding."""
    query_lens = query_lens + [0] * (MOST_ROWS - len(query_lens))
    query_start = np.cumsum([0, *query_lens])
    meta = AttentionMeta(
        page_table=jnp.zeros((len(query_lens), 1), jnp.int32),
        kv_lens=jnp.asarray([n + old if n else 0 for n in query_lens], jnp.int32),
        query_start=jnp.asarray(query_start, jnp.int32),
        slot_mapping=jnp.zeros(MOST_TOKENS, jnp.int32),
        num_decode_rows=jnp.int32(num_decode_rows),
    )
    plan = jitted_plan(meta, MOST_TOKENS)
    return np.asarray(plan.tiles)[: int(plan.num_tiles[0])], query_start, np.asarray(meta.kv_lens)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 9),
    st.lists(st.integers(1, 400), max_size=7),
    st.sampled_from([0, 3, 1000]),
)
def test_tiles_cover_each_token_of_each_chunk_once_costliest_first(decode, chunks, old):
    query_lens = [1] * decode + chunks
    num_tokens = sum(query_lens)
    tiles, query_start, kv_lens = plan_of(query_lens, decode, old)
    assert len(tiles) <= max_tiles(num_tokens, len(query_lens))
    seen = np.zeros(MOST_TOKENS, int)
    for row, token, position, first, end, kv_len, *_ in tiles:
        assert token % 8 == 0
        assert 0 <= first < end <= TILE
        assert kv_len == kv_lens[row]
        assert query_start[row] <= token + first
        assert token + end <= query_start[row + 1]
        assert position + query_start[row + 1] - token == kv_len
        seen[token + first : token + end] += 1
    assert (seen[decode:num_tokens] == 1).all()
    assert not seen[:decode].any()
    assert not seen[num_tokens:].any()
    costs = [position + end for _, _, position, _, end, *_ in tiles]
    assert costs == sorted(costs, reverse=True)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="block_kv is 96; allowed: 64, 128"):
        Config(block_kv=96)
    with pytest.raises(ValueError, match="stages is 1"):
        Config(stages=1)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        Config(num_blocks=0)
    q, _, _, kv_pages, meta, _ = make_inputs(Case("", ((20, 20),), **WIDE, page_size=128))
    with pytest.raises(ValueError, match="block_kv is 64, less than a page of 128"):
        gpu_prefill.attend_chunks(q, q, kv_pages, meta, sm_scale=1.0, config=Config(64))
    with pytest.raises(ValueError, match="more shared memory"):
        gpu_prefill.attend_chunks(q, q, kv_pages, meta, sm_scale=1.0, config=Config(stages=3))


def test_unsupported_cases_are_named():
    spec = AttentionSpec("mixed", 32, 8, 128, 16, "bfloat16")
    assert gpu_prefill.unsupported(spec) is None
    for change, name in (
        ({"head_dim": 256}, "head width 256"),
        ({"head_dim": 96}, "head width 96"),
        ({"kv_dtype": "float32"}, "float32 cache"),
        ({"page_size": 48}, "page size 48"),
    ):
        reason = gpu_prefill.unsupported(dataclasses.replace(spec, **change))
        assert reason is not None
        assert name in reason
    q, _, _, kv_pages, meta, _ = make_inputs(Case("", ((20, 20),), 1, 1, 256))
    with pytest.raises(NotImplementedError, match="head width 256"):
        gpu_prefill.attend_chunks(q, q, kv_pages, meta, sm_scale=1.0)


@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_default_settings_fit(head_dim, page_size, window):
    spec = AttentionSpec("mixed", 32, 8, head_dim, page_size, "bfloat16", sliding_window=window)
    config = gpu_prefill.default_config(spec)
    assert config.block_kv >= page_size
    assert config.shared_memory_bytes(head_dim) <= gpu_prefill.SHARED_MEMORY_BYTES - 1024


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of the NaN in unused cache
    print(json.dumps({case.name: interpret(case, settings) for case, settings in INTERPRETED}))
