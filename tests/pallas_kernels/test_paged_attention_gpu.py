"""The GPU kernel in Pallas's GPU interpreter, which models copies, barriers and races."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import (
    AttentionSpec,
    gpu,
    gpu_decode,
    gpu_prefill,
    paged_attention,
    reference,
    write_kv,
)
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.gpu_plan import BLOCK, Column, make_plan

SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def check(case, config, races=False, **how):
    """Kernel against the reference, both on the same cache, whose unused part is NaN."""
    q, k, v, kv_pages, meta, sinks = make_inputs(case, poison=True)
    kv_pages = write_kv(k, v, kv_pages, meta.slot_mapping)
    options = {
        "sm_scale": case.head_dim**-0.5,
        "kind": case.kind,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
    }
    expected = jax.jit(functools.partial(reference.attend, **options))(
        q, kv_pages, meta, sinks=sinks
    )
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    kernel = functools.partial(gpu.attend, config=config, interpret=interpret, **how, **options)
    out = jax.jit(kernel)(q, kv_pages, meta, sinks=sinks)
    if races:
        assert not interpret_pallas_call.get_races().races_found
    assert out.dtype == q.dtype
    # Weights and outputs are rounded to 16 bits: 2**-8 of values up to about 3.
    tolerance = 1.6e-2 if case.dtype == "bfloat16" else 3e-3
    difference = np.abs(np.asarray(out, np.float64) - np.asarray(expected, np.float64))
    assert difference.max() <= tolerance


@pytest.mark.parametrize(
    ("workers", "window"), [(1, None), (1, 70), (3, None), (3, 1), (3, 70), (20, None), (20, 1)]
)
def test_ragged_rows_over_few_and_many_workers(window, workers):
    rows = tuple((1, n) for n in (300, 1, 64, 65))
    case = Case("", rows, **SMALL, sliding_window=window, padding_rows=1)
    check(case, gpu_decode.Config(workers=workers, stages=2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (16, 1, 64, 128, "bfloat16"),
        (3, 3, 256, 8, "float16"),
        (10, 2, 128, 32, "bfloat16"),
        (2, 2, 64, 64, "float16"),
        (4, 2, 96, 16, "bfloat16"),
        (2, 1, 32, 16, "float16"),
        (40, 1, 96, 16, "bfloat16"),
    ],
)
def test_head_shapes_page_sizes_and_no_races(heads, kv_heads, head_dim, page_size, dtype):
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = Case("", ((1, 200), (1, 70)), **sizes, page_size=page_size, padding_rows=1)
    check(case, gpu_decode.Config(workers=3, stages=2, query_buffers=1), races=True)


@pytest.mark.parametrize("workers", [1, 20])
def test_rows_in_an_output_for_all_tokens_whose_padding_is_zeros(workers):
    case = Case("", ((1, 200), (1, 70)), **SMALL | {"num_heads": 16}, padding_rows=1)
    q, k, v, kv_pages, meta, _ = make_inputs(case, poison=True)
    kv_pages = write_kv(k, v, kv_pages, meta.slot_mapping)
    options = {"sm_scale": 0.1, "sliding_window": None, "soft_cap": None, "sinks": None}
    rows = q, kv_pages, meta.page_table, meta.kv_lens
    config = gpu_decode.Config(workers=workers, stages=2)
    interpret = plgpu.InterpretGPUParams()
    attend = functools.partial(
        gpu_decode.attend_rows_in_place, config=config, interpret=interpret, **options
    )
    out = jax.jit(attend, static_argnums=4)(*rows, 12, jnp.int32(7))
    expected = reference.attend_rows(*rows, **options)
    np.testing.assert_allclose(
        np.asarray(out[:2], np.float32), np.asarray(expected[:2], np.float32), atol=1.6e-2
    )
    assert np.all(np.asarray(out[7:], np.float32) == 0)


@pytest.mark.parametrize(("queries", "window"), [(2, None), (5, 70), (8, 1)])
def test_several_new_tokens_a_row(queries, window):
    rows = tuple((queries, n) for n in (300, queries, 66, 128))
    case = Case("", rows, **SMALL, queries_per_row=queries, sliding_window=window, padding_rows=1)
    check(case, gpu_decode.Config(workers=5, stages=2))


def test_several_new_tokens_of_many_heads_with_sinks():
    rows = tuple((4, n) for n in (150, 9))
    many = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64, "soft_cap": 3.0, "sinks": True}
    case = Case("", rows, **many, queries_per_row=4)
    check(case, gpu_decode.Config(workers=3, stages=2))


def test_two_workers_a_thread_block_and_no_races():
    case = Case("", ((1, 300), (1, 65), (1, 1)), **SMALL)
    check(case, gpu_decode.Config(workers=6, pairs=2, stages=2, query_buffers=1), races=True)


@pytest.mark.parametrize(
    ("workers", "queries", "window"), [(4, 1, 70), (4, 5, None), (20, 1, None)]
)
def test_first_segments_that_are_read_early(workers, queries, window):
    rows = tuple((queries, n) for n in (300, queries, 64, 65, 129))
    case = Case("", rows, **SMALL, queries_per_row=queries, sliding_window=window, padding_rows=1)
    config = gpu_decode.Config(workers=workers, stages=2)
    check(case, config, races=workers == 4, reads_early=True)


def test_soft_cap_and_sinks():
    case = Case("", ((1, 130), (1, 20)), **SMALL, soft_cap=3.0, sinks=True)
    check(case, gpu_decode.Config(workers=4, stages=3))


@pytest.mark.parametrize(("page_size", "queries"), [(8, 2), (32, 1)])
def test_what_lies_past_the_last_page_of_short_rows_does_not_count(page_size, queries):
    rows = tuple((queries, n) for n in (queries, 9, 65, 72))
    every = SMALL | {"soft_cap": 3.0, "sinks": True, "sliding_window": 60}
    case = Case("", rows, **every, page_size=page_size, queries_per_row=queries)
    check(case, gpu_decode.Config(workers=9, stages=2))  # few blocks each: most find NaN there


def test_mixed_step_agrees_with_the_reference(monkeypatch):
    monkeypatch.setattr(
        gpu_decode, "default_config", lambda *_: gpu_decode.Config(workers=3, stages=2)
    )
    few = gpu_prefill.Config(num_blocks=2)
    monkeypatch.setattr(gpu_prefill, "default_config", lambda spec: few)
    case = Case("", ((1, 130), (1, 20), (40, 90)), **SMALL, padding_rows=1, padding_tokens=3)
    q, k, v, kv_pages, meta, _ = make_inputs(case)
    call = functools.partial(paged_attention, sm_scale=0.1, kind="mixed")
    expected, _ = call(q, k, v, kv_pages, meta)
    out, _ = call(q, k, v, kv_pages, meta, impl="gpu", interpret=True)
    np.testing.assert_allclose(np.float32(out), np.float32(expected), atol=1.6e-2)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 12]).flatmap(  # few sizes: each is compiled anew
        lambda n: st.sampled_from([384, 3000]).flatmap(
            lambda most: st.lists(st.integers(1, most), max_size=n).map(
                lambda lens: lens + [0] * (n - len(lens))
            )
        )
    ),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([None, 1, 100]),
    st.sampled_from([1, 5, 264]),
    st.sampled_from([1, 4]),
)
def test_plan_covers_every_block_once(lens, num_kv_heads, window, workers, queries_per_row):
    plan = make_plan(jnp.asarray(lens, jnp.int32), num_kv_heads, window, workers, queries_per_row)
    plan = np.asarray(plan)
    live = sum(n > 0 for n in lens)
    first_blocks = [max(0, n - (queries_per_row - 1) - (window or n)) // BLOCK for n in lens]
    done = []
    doers = {}  # of a task: workers, in order
    starters = {}  # of a worker's first task
    merged = {}
    for worker, line in enumerate(plan.tolist()):
        row, head, block, length, count, tasks, starter, live_rows, *split = line
        assert live_rows == live
        assert length == lens[row]
        starters[worker] = (starter, tasks and (row, head))
        for _ in range(tasks):
            todo = min(-(-lens[row] // BLOCK) - block, count)
            assert todo > 0
            done += [(row, head, block + i) for i in range(todo)]
            doers.setdefault((row, head), []).append(worker)
            count -= todo
            head += 1
            if head == num_kv_heads:
                row, head = min(row + 1, len(lens) - 1), 0
            block = first_blocks[row]
        assert count == 0
        row, head, parts, written = split
        assert written == 0
        if parts:
            merged[row, head] = list(range(worker, worker + parts))
    expected = [
        (row, head, block)
        for row, n in enumerate(lens)
        for head in range(num_kv_heads)
        for block in range(first_blocks[row], -(-n // BLOCK))
    ]
    assert sorted(done) == expected
    assert merged == {task: at for task, at in doers.items() if len(at) > 1}
    assert all(task == 0 or doers[task][0] == first for first, task in starters.values())


@pytest.mark.parametrize(
    ("lens", "blocks", "workers"),
    [
        ([264] * 8, [5] * 64, 264),  # each task has a worker of its own
        ([300, 10, 384, 64, 65, 0], [5] * 8 + [1] * 8 + [6] * 8 + [1] * 8 + [2] * 8, 264),
        ([264] * 4, [1] * 160, 264),  # tasks of an eighth of the workers or fewer are in parts
        ([264] * 8, [6] * 53 + [2], 56),  # so are those of more tasks than workers
        ([385] * 8, [2] * 224, 264),  # and long ones
    ],
)
def test_short_tasks_are_not_cut(lens, blocks, workers):
    plan = make_plan(jnp.asarray(lens, jnp.int32), 8, None, workers)
    assert [n for n in plan[:, Column.COUNT].tolist() if n] == blocks


def test_unsupported_cases_are_named():
    spec = AttentionSpec("decode", 32, 8, 128, 16, "bfloat16")
    assert gpu.unsupported(spec) is None
    for change, said in (
        ({"head_dim": 80}, "head width 80"),
        ({"head_dim": 288}, "head width 288"),
        ({"num_heads": 520}, "65 heads x 1 queries a kv head"),
        ({"queries_per_row": 17}, "4 heads x 17 queries a kv head"),
        ({"kv_dtype": "float32"}, "a float32 cache"),
        ({"page_size": 24}, "page size 24"),
    ):
        assert said in gpu.unsupported(dataclasses.replace(spec, **change))


@pytest.mark.parametrize("head_dim", range(32, 257, 32))
@pytest.mark.parametrize("num_heads", [8, 32, 512])
def test_default_config_fits_shared_memory(num_heads, head_dim):
    spec = AttentionSpec("decode", num_heads, 8, head_dim, 16, "bfloat16")
    config = gpu_decode.default_config(spec)
    assert config.shared_bytes(head_dim, num_heads // 8) <= gpu_decode.SHARED_BYTES


def test_many_queries_are_in_even_tiles():
    counts = 1, 8, 9, 32, 33, 40, 64
    tiles = (1, 8), (1, 8), (1, 16), (1, 32), (2, 24), (2, 24), (2, 32)
    assert tuple(map(gpu_decode.query_tiles, counts)) == tiles
