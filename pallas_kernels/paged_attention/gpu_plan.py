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
once, not once a layer. It does so in three kernels ahead of all layers (tests/test_aot.py counts),
whose number is what they cost, not what they do: 2 to 3 us each, H200. What makes a kernel of its
own is a sum that others wait for, so there are two, over rows; and what is cheap to compute anew is
not kept for several uses, hence shifts, and indices that nothing clips.
"""

import enum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS  # tokens; also the rows of a wgmma
NEAR = 4
"""Blocks by which a cut moves at most, and an eighth of a share (2 % of a step of 256 rows of 264
tokens, H200; where shares are small, waiting for one that has more costs more than merging)."""
WHOLE = 6
"""Blocks of the longest task with which each is a worker's, though workers stay idle: 2 % of a step
of 8 or 16 rows of 264 tokens, H200. Of one row's tasks, an eighth of the workers or fewer, parts
are faster by 1 %."""


class Column(enum.IntEnum):
    """Of a plan, which is the same for every layer of a step: a line a worker."""

    ROW = 0
    """Of the worker's first task."""
    HEAD = 1
    BLOCK = 2
    """Of the row, to start at."""
    LENGTH = 3
    """Of the row."""
    COUNT = 4
    """Blocks to do."""
    TASKS = 5
    """Touched."""
    STARTER = 6
    """The worker that began the first task."""
    LIVE_ROWS = 7
    SPLIT_ROW = 8
    """Of the task that the worker begins and doesn't end."""
    SPLIT_HEAD = 9
    PARTS = 10
    """Of that task; 0 where there is none."""
    WRITTEN = 11
    """Parts written so far, which the kernel counts up and sets back to 0."""


def first_block(length, sliding_window: int | None, queries_per_row: int):
    """The first that a row's queries see."""
    if not sliding_window:
        return 0 * length
    return jnp.maximum(length - (queries_per_row - 1) - sliding_window, 0) >> BLOCK_BITS


@jax.named_scope("decode_plan")
def make_plan(
    kv_lens: Int[Array, "S"],
    num_kv_heads: int,
    sliding_window: int | None,
    workers: int,
    queries_per_row: int = 1,
) -> Int[Array, "workers columns"]:
    """Cuts the batch's blocks into equal shares; rows of length 0 come last."""
    num_rows = len(kv_lens)

    def of_row(values, row):
        return values.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)

    first = first_block(kv_lens, sliding_window, queries_per_row)
    blocks = ((kv_lens + BLOCK - 1) >> BLOCK_BITS) - first
    place = jnp.arange(num_rows)
    up_to = jnp.where(place <= place[:, None], blocks, 0)  # cumulative sums are slower
    ends = jnp.sum(up_to, axis=1) * num_kv_heads
    longest = jnp.max(up_to, axis=1)[-1]
    live_rows = jnp.sum(up_to > 0, axis=1)[-1]
    total, tasks = ends[-1], live_rows * num_kv_heads
    is_whole = (workers // 8 < tasks) & (tasks <= workers) & (longest <= WHOLE)
    share = jnp.maximum(lax.div(total + workers - 1, workers), 1)
    near = jnp.minimum(NEAR, share >> 3)

    # Of each worker the cut where it starts, and of the last the one where it ends.
    cut = jnp.arange(workers + 1)
    flat = cut * share
    row = jnp.sum(flat[:, None] >= ends, axis=1)
    row = jnp.minimum(jnp.where(is_whole, lax.div(cut, num_kv_heads), row), num_rows - 1)
    width = jnp.maximum(of_row(blocks, row), 1)
    row_begin = of_row(ends - blocks * num_kv_heads, row)
    inside = jnp.where(is_whole, lax.rem(cut, num_kv_heads) * width, flat - row_begin)
    head = lax.div(inside, width)
    before = inside - head * width
    begin = row_begin + head * width
    # How far one moves: back to where its task begins, unless the end is nearer.
    back, on = jnp.minimum(near, width >> 1), jnp.minimum(near, (width - 1) >> 1)
    is_end = jnp.where(is_whole, cut >= tasks, flat >= total)
    moved_on = ~is_end & (width - before <= on)
    is_inside = ~(is_end | moved_on | (before <= back))
    before = jnp.where(is_inside, before, 0)
    task = jnp.where(is_end, tasks, row * num_kv_heads + head + moved_on)
    flat = jnp.where(is_end, total, begin + jnp.where(moved_on, width, before))

    worker = cut[:-1]
    first_row = jnp.minimum(lax.div(task, num_kv_heads), num_rows - 1)[:-1]
    # A share is wider than cuts move, so of a task that is cut the first worker and the last follow
    # from where it begins and ends.
    starter = jnp.where(is_inside, lax.div(begin + back, share), cut)[:-1]
    finisher = lax.div(begin + width - 1 - on, share)[1:]
    is_split = is_inside[1:] & (begin[1:] >= flat[:-1])
    columns = {
        Column.ROW: first_row,
        Column.HEAD: lax.rem(task, num_kv_heads)[:-1],
        Column.BLOCK: before[:-1] + of_row(first, first_row),
        Column.LENGTH: of_row(kv_lens, first_row),
        Column.COUNT: flat[1:] - flat[:-1],
        Column.TASKS: (task + is_inside)[1:] - task[:-1],
        Column.STARTER: starter,
        Column.LIVE_ROWS: jnp.broadcast_to(live_rows, worker.shape),
        Column.SPLIT_ROW: row[1:],
        Column.SPLIT_HEAD: head[1:],
        Column.PARTS: jnp.where(is_split, finisher - worker + 1, 0),
        Column.WRITTEN: jnp.zeros_like(worker),
    }
    return jnp.stack([columns[column] for column in Column], axis=1).astype(jnp.int32)
