"""The reference against a dense float64 softmax that knows nothing of pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import choose
from pallas_kernels.paged_attention import AttentionSpec, paged_attention, reference, write_kv
from pallas_kernels.paged_attention.cases import Case, make_inputs

# float32 sums in another order over a few hundred keys; 16-bit: the output's own rounding, at
# magnitudes up to 4.
TOLERANCE = {"float32": 5e-6, "float16": 3e-3, "bfloat16": 2e-2}


def dense_oracle(case, q, k, v, kv_pages, meta, sinks, sm_scale):
    """float64 outputs [T, N, H]; zeros for padding."""
    q, k, v, cache = (np.asarray(a).astype(np.float64) for a in (q, k, v, kv_pages))
    cache = cache.reshape(-1, *cache.shape[2:])
    cache[np.asarray(meta.slot_mapping)] = np.stack([k, v], 2).reshape(len(k), -1, k.shape[-1])
    out = np.zeros(q.shape)
    token = 0
    group = case.num_heads // case.num_kv_heads
    for row, (query_len, kv_len) in enumerate(case.rows):
        pages = np.asarray(meta.page_table)[row, : -(-kv_len // case.page_size)]
        slots = (pages[:, None] * case.page_size + np.arange(case.page_size)).reshape(-1)[:kv_len]
        for i in range(query_len):
            position = kv_len - query_len + i
            low = max(0, position - case.sliding_window + 1) if case.sliding_window else 0
            for head in range(case.num_heads):
                kv_head = head // group
                keys = cache[slots[low : position + 1], 2 * kv_head]
                values = cache[slots[low : position + 1], 2 * kv_head + 1]
                scores = keys @ q[token, head] * sm_scale
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                if sinks is not None:
                    scores = np.append(scores, np.asarray(sinks, np.float64)[head])
                    values = np.append(values, np.zeros_like(values[:1]), 0)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
            token += 1
    return out


def run(case, inputs, impl="reference", **options):
    q, k, v, kv_pages, meta, sinks = inputs
    call = jax.jit(
        functools.partial(
            paged_attention,
            sm_scale=case.head_dim**-0.5,
            kind=case.kind,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            impl=impl,
            **options,
        )
    )
    return call(q, k, v, kv_pages, meta, sinks=sinks)


def check(case, seed=0, impl="reference", **options):
    inputs = make_inputs(case, seed, poison=True)
    out, _ = run(case, inputs, impl, **options)
    assert out.dtype == inputs[0].dtype
    expected = dense_oracle(case, *inputs, case.head_dim**-0.5)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=0, atol=TOLERANCE[case.dtype]
    )


SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 40])
def test_mixed_batch_equals_dense_softmax(page_size, window):
    rows = ((1, 1), (1, 130), (1, 64), (70, 200), (5, 5), (33, 33), (1, 77))
    check(
        Case(
            "",
            rows,
            **SMALL,
            page_size=page_size,
            sliding_window=window,
            padding_rows=2,
            padding_tokens=9,
        )
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_decode_equals_dense_softmax(rows, window):
    lens = (300, 1, 64, 65, 17, 500, 128, 2, 90, 33, 7)[:rows]
    case = Case(
        "", tuple((1, n) for n in lens), **SMALL, sliding_window=window, padding_rows=rows // 2
    )
    check(case)


@pytest.mark.parametrize("window", [None, 3])
def test_decode_with_several_queries_a_row_equals_dense_softmax(window):
    rows = tuple((3, n) for n in (300, 3, 64, 66))
    case = Case("", rows, **SMALL, queries_per_row=3, sliding_window=window, padding_rows=2)
    check(case)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 64), (9, 3, 64), (4, 4, 96), (8, 1, 128), (16, 1, 256), (10, 2, 80)],
)
def test_head_shapes(num_heads, num_kv_heads, head_dim):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(Case("", ((1, 70), (1, 9), (20, 90)), **sizes, dtype="float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [((1, 70), (1, 9)), ((1, 70), (40, 90))])
def test_sixteen_bit_caches(dtype, rows):
    check(Case("", rows, **{**SMALL, "dtype": dtype}, padding_rows=1))


@pytest.mark.parametrize("rows", [((1, 170), (1, 9)), ((1, 70), (40, 90))])
@pytest.mark.parametrize("window", [None, 30])
def test_soft_cap_and_sinks(rows, window):
    check(Case("", rows, **SMALL, sliding_window=window, soft_cap=2.0))
    check(Case("", rows, **SMALL, sliding_window=window, sinks=True))
    check(Case("", rows, **SMALL, sliding_window=window, soft_cap=2.0, sinks=True))


def test_rows_of_length_zero_between_others_give_zeros():
    case = Case("", ((1, 200), (1, 30), (1, 70), (1, 5)), **SMALL)
    q, k, v, kv_pages, meta, sinks = make_inputs(case, poison=True)
    expected = dense_oracle(case, q, k, v, kv_pages, meta, sinks, 0.125)
    expected[1] = expected[2] = 0
    lens = meta.kv_lens.at[1:3].set(0)
    out, _ = run(case, (q, k, v, kv_pages, dataclasses.replace(meta, kv_lens=lens), sinks))
    np.testing.assert_allclose(np.asarray(out), expected, atol=5e-6)


@st.composite
def ragged(draw):
    decode = draw(st.lists(st.integers(1, 200), max_size=12))
    chunks = draw(
        st.lists(st.tuples(st.integers(2, 90), st.integers(0, 150)), max_size=3).filter(
            lambda rows: rows or decode
        )
    )
    rows = tuple((1, n) for n in decode) + tuple((n, n + old) for n, old in chunks)
    return Case(
        "",
        rows,
        **SMALL,
        page_size=draw(st.sampled_from([8, 16, 64])),
        sliding_window=draw(st.sampled_from([None, 1, 50])),
        padding_rows=draw(st.integers(0, 3)),
        padding_tokens=draw(st.integers(0, 40)),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(ragged())
def test_random_ragged_batches(case):
    check(case)


def test_a_decode_row_gives_the_same_alone_in_a_batch_and_in_a_mixed_step():
    case = Case("", ((1, 300), (1, 40), (40, 60)), **SMALL)
    q, k, v, kv_pages, meta, _ = make_inputs(case)
    mixed, _ = run(case, (q, k, v, kv_pages, meta, None))
    two = dataclasses.replace(
        meta,
        page_table=meta.page_table[:2],
        kv_lens=meta.kv_lens[:2],
        query_start=meta.query_start[:3],
        slot_mapping=meta.slot_mapping[:2],
    )
    decode, _ = run(Case("", case.rows[:2], **SMALL), (q[:2], k[:2], v[:2], kv_pages, two, None))
    np.testing.assert_allclose(mixed[:2], decode, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 100])
def test_write_kv_puts_each_token_at_its_slot(num_tokens):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, num_tokens, 3, 64)).astype(np.float32)
    pages = rng.standard_normal((12, 16, 6, 64)).astype(np.float32)
    slots = rng.permutation(12 * 16)[:num_tokens].astype(np.int32)
    expected = pages.copy().reshape(-1, 3, 2, 64)
    expected[slots, :, 0], expected[slots, :, 1] = k, v
    out = jax.jit(write_kv)(k, v, jnp.asarray(pages), slots)
    np.testing.assert_array_equal(np.asarray(out).reshape(expected.shape), expected)


@pytest.mark.parametrize("rows", [((1, 300),) * 4, ((1, 300), (100, 300))])
def test_donated_cache_is_updated_in_place(rows):
    case = Case("", rows, **SMALL)
    q, k, v, kv_pages, meta, _ = make_inputs(case)
    kv_pages = jnp.zeros((4096, *kv_pages.shape[1:]), kv_pages.dtype)  # 64 MiB

    def step(pools, q, k, v, meta):
        updated = []
        for pool in pools:
            q, pool = paged_attention(q, k, v, pool, meta, sm_scale=0.1, kind=case.kind)
            updated.append(pool)
        return q, tuple(updated)

    compiled = jax.jit(step, donate_argnums=0).lower((kv_pages,) * 3, q, k, v, meta).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * kv_pages.nbytes
    assert memory.temp_size_in_bytes < kv_pages.nbytes // 8


@pytest.mark.parametrize("rows", [((1, 150),) * 3, ((1, 70), (40, 90))])
@pytest.mark.parametrize("mesh_given", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
def test_heads_over_four_devices_equal_one_device_and_move_no_cache(rows, mesh_given, sinks):
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": "float32"}
    case = Case("", rows, **sizes, sinks=sinks, padding_rows=1)
    inputs = make_inputs(case)
    expected, expected_pages = run(case, inputs)
    mesh = jax.make_mesh(
        (1, 1, 4),
        ("data", "expert", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:4],
    )

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    q, k, v = (put(a, None, "tensor") for a in inputs[:3])
    kv_pages = put(inputs[3], None, None, "tensor")
    meta = jax.tree.map(put, inputs[4])
    sink = put(inputs[5], "tensor") if sinks else None

    def call(q, k, v, kv_pages, meta, sinks):
        return paged_attention(
            q,
            k,
            v,
            kv_pages,
            meta,
            sm_scale=0.125,
            kind=case.kind,
            sinks=sinks,
            mesh=mesh if mesh_given else None,
        )

    heads = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    jitted = jax.jit(call, donate_argnums=3, out_shardings=(heads, kv_pages.sharding))
    compiled = jitted.lower(q, k, v, kv_pages, meta, sink).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    out, pages = compiled(q, k, v, kv_pages, meta, sink)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(pages, expected_pages)


def test_rows_in_place_leave_chunks_to_be_written_and_padding_zero():
    case = Case("", ((1, 20), (1, 9), (7, 30), (5, 5)), **SMALL, padding_rows=2, padding_tokens=3)
    q, _, _, kv_pages, meta, _ = make_inputs(case)
    options = {"sm_scale": 0.3, "kind": "mixed"}

    def in_place(q, kv_pages, page_table, kv_lens, num_tokens, padding_from, **options):
        rows = reference.attend_rows(q, kv_pages, page_table, kv_lens, **options)
        out = jnp.full((num_tokens, *q.shape[1:]), 7, q.dtype).at[padding_from:].set(0)
        return out.at[:2].set(rows[:2])

    out = reference.attend(q, kv_pages, meta, rows_in_place=in_place, **options)
    expected = reference.attend(q, kv_pages, meta, **options)
    np.testing.assert_array_equal(out, expected)
    assert not np.any(out[14:])


def test_contradictions_are_refused():
    q, k, v, kv_pages, meta, _ = make_inputs(Case("", ((1, 20), (1, 9)), **SMALL))
    call = functools.partial(paged_attention, sm_scale=1.0, kind="decode")
    with pytest.raises(ValueError, match=r"k is \(2, 1, 64\), q \(2, 4, 64\)"):
        call(q, k[:, :1], v[:, :1], kv_pages, meta)
    with pytest.raises(ValueError, match="k and v come together"):
        call(q, None, v, kv_pages, meta)
    one = dataclasses.replace(
        meta, kv_lens=meta.kv_lens[:1], page_table=meta.page_table[:1], query_start=jnp.arange(2)
    )
    three = [jnp.concatenate([a, a[:1]]) for a in (q, k, v)]
    uneven = dataclasses.replace(meta, slot_mapping=jnp.arange(3))
    with pytest.raises(ValueError, match="decode: 3 tokens for 2 rows; allowed: 1 to 8 each"):
        call(*three, kv_pages, uneven)
    nine = [jnp.resize(a, (9, *a.shape[1:])) for a in (q, k, v)]
    many = dataclasses.replace(one, slot_mapping=jnp.arange(9))
    with pytest.raises(ValueError, match="decode: 9 tokens for 1 rows; allowed: 1 to 8 each"):
        call(*nine, kv_pages, many)
    with pytest.raises(ValueError, match="impl is 'cuda'; allowed: reference, tpu, gpu"):
        call(q, k, v, kv_pages, meta, impl="cuda")
    with pytest.raises(ValueError, match="sliding_window is 0"):
        call(q, k, v, kv_pages, meta, sliding_window=0)


TPU_SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": "float32"}


@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("window", [None, 1, 300])
def test_tpu_kernel_interpreted_equals_dense_softmax(page_size, window):
    rows = tuple((1, n) for n in (700, 1, 256, 257, 30))
    case = Case("", rows, **TPU_SIZES, page_size=page_size, sliding_window=window, padding_rows=2)
    check(case, impl="tpu", interpret=True)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (16, 1), (6, 6), (10, 2)])
def test_tpu_kernel_interpreted_head_shapes_soft_cap_and_sinks(num_heads, num_kv_heads):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 256}
    rows = ((1, 300), (1, 20))
    check(
        Case("", rows, **sizes, dtype="float32", soft_cap=3.0, sinks=True),
        impl="tpu",
        interpret=True,
    )
    check(Case("", rows, **sizes, dtype="bfloat16", sinks=True), impl="tpu", interpret=True)


def test_tpu_mixed_step_sends_chunks_through_the_reference():
    case = Case("", ((1, 300), (1, 20), (40, 90)), **TPU_SIZES, padding_rows=1, padding_tokens=3)
    check(case, impl="tpu", interpret=True)


def test_tpu_kernel_names_what_it_cannot_do():
    inputs = make_inputs(Case("", ((1, 20),), **SMALL))
    with pytest.raises(NotImplementedError, match="head width 64"):
        run(Case("", ((1, 20),), **SMALL), inputs, impl="tpu", interpret=True)


def test_dispatch_is_explicit():
    spec = AttentionSpec("decode", 32, 8, 128, 16, "bfloat16")
    assert choose("cpu", "cpu", spec) == "reference"
    assert choose("gpu", "NVIDIA H200", spec) == "gpu"
    assert choose("tpu", "TPU v6 lite", spec) == "tpu"
    assert choose("tpu", "TPU v6 lite", dataclasses.replace(spec, head_dim=64)) == "reference"
    with pytest.raises(ValueError, match="platform is 'metal'"):
        choose("metal", "M4", spec)
