"""Which shapes are compiled, and which of them a batch runs in."""

from jaxserve.execution.buckets import Buckets


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
