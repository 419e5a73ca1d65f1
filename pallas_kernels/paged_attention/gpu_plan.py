"""How the GPU decode kernel's work is shared out.

Blocks of all (row, kv head) tasks form one flat list that is cut into about equal ranges, one a
worker, so a ragged batch and a single long row both fill the card (Stream-K, arXiv:2301.03598;
split-KV, arXiv:2311.01282 section 3):

    task      |  0  |       1        | 2 |   3    |     blocks of (row, kv head), rows in order
    worker    |   0    |   1    |   2    |   3    |     equal shares
    writes      out  p1   p2      p4  out    out        p: a partial result

A task that one worker does alone goes straight to the output; merging takes longer than a few
blocks, so a cut that is near a task's end moves there, and of short tasks each has a worker, where
there are as many. A worker's range splits two tasks at most: the one it continues, whose partial
result it keeps at slot 2 * worker, and the one that goes on in the next worker, at 2 * worker + 1.
A task in parts is counted where its first worker is.

Calls with the same lengths, heads and window share one plan: inside a jitted step XLA computes it
once, not once a layer (tests/test_aot.py counts).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 64  # tokens; also the rows of a wgmma
NEAR = 4
"""Blocks by which a cut moves at most, and an eighth of a share (2 % of a step of 256 rows of 264
tokens, H200; where shares are small, waiting for one that has more costs more than merging)."""
WHOLE = 6
"""Blocks of the longest task with which each is a worker's, though workers stay idle: 2 % of a step
of 8 or 16 rows of 264 tokens, H200. Of one row's tasks, an eighth of the workers or fewer, parts
are faster by 1 %."""


class Plan(NamedTuple):
    """The flat list of work, the same for every layer of a step. Rows with work come first.

    Columns of `work`: place, head and block to start at; blocks; segments (tasks touched); live
    rows; the worker that began the first task; that task's row and its length.
    Columns of `splits`, of the task that a worker begins and doesn't end: row; head; parts, or 0
    where there is no such task; parts written so far, which the kernel counts up and sets back.
    """

    rows: Int[Array, "S"]  # place in the list -> row
    lens: Int[Array, "S"]  # by place
    first_block: Int[Array, "S"]  # by place; later than 0 only with a sliding window
    work: Int[Array, "workers 9"]
    splits: Int[Array, "workers 4"]


@jax.named_scope("decode_plan")
def make_plan(
    kv_lens: Int[Array, "S"],
    num_kv_heads: int,
    sliding_window: int | None,
    workers: int,
    queries_per_row: int = 1,
) -> Plan:
    """Cuts the batch's blocks into equal shares. A few thousand integer operations."""
    num_rows = len(kv_lens)
    first = 0 * kv_lens
    if sliding_window:
        first = jnp.maximum(kv_lens - (queries_per_row - 1) - sliding_window, 0) // BLOCK
    blocks = (kv_lens + BLOCK - 1) // BLOCK - first
    live = blocks > 0
    num_live = jnp.sum(live, dtype=jnp.int32)
    place = jnp.where(live, jnp.cumsum(live) - 1, num_live + jnp.cumsum(~live) - 1)
    rows = jnp.zeros_like(kv_lens).at[place].set(jnp.arange(num_rows, dtype=kv_lens.dtype))
    lens = kv_lens[rows]
    placed_blocks = blocks[rows]
    ends = jnp.cumsum(placed_blocks) * num_kv_heads
    begins, total = ends - placed_blocks * num_kv_heads, ends[-1]
    share = jnp.maximum((total + workers - 1) // workers, 1)

    def locate(flat):  # [W] -> place, head, block from the row's first, blocks of the row
        at = jnp.minimum(jnp.sum(flat[:, None] >= ends, axis=1), num_rows - 1)
        inside = flat - begins[at]
        width = jnp.maximum(placed_blocks[at], 1)
        return at, inside // width, inside % width, width

    worker = jnp.arange(workers)
    cuts = jnp.minimum(jnp.arange(workers + 1) * share, total)
    _, _, before, width = locate(cuts)
    after, near = width - before, jnp.minimum(NEAR, share // 8)
    moved = jnp.where(after <= near, cuts + after, cuts)
    moved = jnp.where((before <= near) & (before <= after), cuts - before, moved)
    cuts = jnp.where(cuts < total, moved, total)
    tasks, task = num_live * num_kv_heads, jnp.arange(workers + 1)
    at = jnp.minimum(task // num_kv_heads, num_rows - 1)
    own = begins[at] + task % num_kv_heads * placed_blocks[at]
    is_whole = (workers // 8 < tasks) & (tasks <= workers) & (jnp.max(blocks) <= WHOLE)
    cuts = jnp.where(is_whole, jnp.where(task < tasks, own, total), cuts)
    start, count = cuts[:-1], cuts[1:] - cuts[:-1]
    start = jnp.minimum(start, jnp.maximum(total - 1, 0))
    at, head, block, _ = locate(start)
    last = jnp.clip(start + count - 1, 0, jnp.maximum(total - 1, 0))
    last_at, last_head, last_block, width = locate(last)
    segments = jnp.where(count > 0, (last_at - at) * num_kv_heads + last_head - head + 1, 0)

    def worker_at(flat):
        return jnp.sum(flat[:, None] >= cuts, axis=1) - 1

    starter = jnp.where(count > 0, worker_at(start - block), worker)
    live_rows = 0 * worker + num_live
    work = [at, head, block + first[rows][at], count, segments, live_rows, starter]
    task_end = last - last_block + width
    is_split = (count > 0) & (last_block < count) & (task_end > start + count)
    parts = jnp.where(is_split, worker_at(task_end - 1) - worker + 1, 0)
    return Plan(
        rows=rows,
        lens=lens,
        first_block=first[rows],
        work=jnp.stack([*work, rows[at], lens[at]], axis=1).astype(jnp.int32),
        splits=jnp.stack([rows[last_at], last_head, parts, 0 * worker], axis=1).astype(jnp.int32),
    )
