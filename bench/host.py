"""What the host does between two steps, without a device: scheduling, packing and committing, in
microseconds a step.

Run: python -m bench.host
"""

import argparse
import time

import numpy as np

from bench import record
from bench.trace import SplitMix64
from jaxserve.execution.buckets import Buckets
from jaxserve.execution.step import Packer
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.types import Request, TokenSampling

VOCAB_SIZE = 128256


def measure(num_seqs: int, context: int, steps: int, temperature: float) -> dict[str, float]:
    """Steady decoding of `num_seqs` sequences of about `context` tokens, one step of overlap;
    medians over steps."""
    page_size, page_limit = 16, 512
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_batched_tokens=8192,
            max_model_len=page_size * page_limit,
            page_size=page_size,
            num_pages=num_seqs * (context + steps + 64) // page_size * 2,
        )
    )
    buckets = Buckets.choose(
        platform="gpu", max_num_seqs=num_seqs, max_batched_tokens=8192, pages=page_limit
    )
    packer = Packer(num_seqs, page_limit, VOCAB_SIZE)
    random = SplitMix64(0)
    for i in range(num_seqs):
        sampling = TokenSampling(max_tokens=steps + 32, temperature=temperature, top_p=0.9)
        scheduler.add(
            Request(request_id=str(i), token_ids=random.tokens(context, 32000), sampling=sampling)
        )
    taken: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    previous = None
    while scheduler.has_work:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        shape = batch and buckets.step(batch.kind, batch.num_tokens, len(batch.rows))
        if batch is not None and shape is not None:
            packer.pack(batch, shape)
        packed = time.perf_counter()
        if previous is not None:
            scheduler.commit(previous, np.full(len(previous.sampling_rows), 77).tolist())
        committed = time.perf_counter()
        if batch is not None and shape is not None:
            packer.pack_sampling(batch, buckets.num_logits(len(batch.rows)))
        packed_sampling = time.perf_counter()
        if batch is not None and previous is not None and batch.kind == "decode" == previous.kind:
            taken["schedule"].append(scheduled - start)
            taken["pack"].append(packed - scheduled + packed_sampling - committed)
            taken["commit"].append(committed - packed)
        previous = batch
    medians = {f"{name}_us": float(np.median(times) * 1e6) for name, times in taken.items()}
    medians["total_us"] = sum(medians.values())
    medians["p99_total_us"] = float(
        np.percentile(np.sum([taken[name] for name in taken], axis=0), 99) * 1e6
    )
    return {name: round(value, 1) for name, value in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    figures = {
        f"{num_seqs} sequences, {name}": measure(
            num_seqs, arguments.context, arguments.steps, temperature
        )
        for num_seqs in (1, 32, 256)
        for name, temperature in (("greedy", 0.0), ("temperature and top-p", 0.8))
    }
    record.store("host", record.cpu_name(), figures)


if __name__ == "__main__":
    main()
