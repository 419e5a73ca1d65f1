"""Which shapes are compiled, and which of them a batch runs in."""

import pytest

from jaxserve.execution.buckets import Buckets, ladder


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((1, 8), [1, 2, 4, 8]),
        ((1, 100), [1, 2, 4, 8, 16, 32, 48, 64, 96, 100]),
        ((256, 4096, 1024), [256, 512, 1024, 1536, 2048, 3072, 4096]),
        ((32, 200, 32, 64), [32, 48, 64, 80, 96, 112, 128, 160, 192, 200]),
        ((64, 64), [64]),
    ],
)
def test_sizes_grow_by_parts_of_powers_of_two(arguments, sizes):
    assert ladder(*arguments) == sizes


def test_more_decode_rows_than_64_are_padded_by_a_quarter_at_most():
    gpu = Buckets.choose(platform="gpu", max_num_seqs=512, max_batched_tokens=4096, pages=16)
    assert gpu.decode_seqs[-8:] == (160, 192, 224, 256, 320, 384, 448, 512)
    for rows in range(65, 513):
        assert gpu.step("decode", rows, rows).seqs < 1.25 * rows


def test_logits_are_padded_to_few_sizes_where_rows_are_cheap():
    gpu = Buckets.choose(platform="gpu", max_num_seqs=256, max_batched_tokens=2048, pages=16)
    assert {s.rows for s in gpu.samples()} == {8, 32, 64, 128, 256}
    assert [gpu.num_logits(rows) for rows in (1, 8, 9, 40, 129, 256)] == [8, 8, 32, 64, 256, 256]
    large = Buckets.choose(platform="gpu", max_num_seqs=600, max_batched_tokens=2048, pages=16)
    assert {s.rows for s in large.samples()} == {8, 32, 64, 128, 256, 512, 600}
    assert large.num_logits(200) == 256
    small = Buckets.choose(platform="gpu", max_num_seqs=4, max_batched_tokens=2048, pages=16)
    assert {s.rows for s in small.samples()} == {4}
    cpu = Buckets.choose(platform="cpu", max_num_seqs=8, max_batched_tokens=64, pages=16)
    assert all(cpu.num_logits(rows) == rows for rows in cpu.decode_seqs)
    assert {s.rows for s in cpu.samples()} == set(cpu.decode_seqs)


@pytest.mark.parametrize(("most", "rows"), [(5, 5), (9, 16), (100, 104), (250, 256)])
def test_more_rows_than_8_are_eights_as_kernels_want_them(most, rows):
    gpu = Buckets.choose(platform="gpu", max_num_seqs=most, max_batched_tokens=most, pages=16)
    assert gpu.max_num_seqs == gpu.decode_seqs[-1] == gpu.logit_rows[-1] == gpu.mixed_tokens[-1]
    assert gpu.max_num_seqs == rows
    sizes = {*gpu.decode_seqs, *gpu.mixed_tokens, *gpu.logit_rows}
    assert all(size <= 8 or size % 8 == 0 for size in sizes)
