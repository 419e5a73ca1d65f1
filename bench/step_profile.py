"""Where a decode step's time goes on the device: kernels by name, and the gaps between them.

Run: python -m bench.step_profile MODEL [--load-format dummy] [--batches 1,64] [--tokens 64]
Kernel times come from JAX's profiler, under which XLA doesn't use command buffers: gaps are larger
than in service.
"""

import collections
import pathlib
import re
import tempfile
from typing import Any

import jax

from bench import engines, record
from bench.trace import make_prompts
from jaxserve import LLM, SamplingParams

TOP = 25


def device_events(folder: str) -> list[tuple[str, int, int]]:
    """(name, start, duration) in nanoseconds of what ran on the first device, in order of start."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    events = [
        (event.name, int(event.start_ns), int(event.duration_ns))
        for plane in data.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(events, key=lambda event: event[1])


def measure(llm: LLM, batch: int, tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = make_prompts(batch, 128, batch, llm.info.vocab_size)
    llm.generate(prompts, params)
    before = llm.stats().num_steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            llm.generate(prompts, params)
        events = device_events(folder)
    steps = llm.stats().num_steps - before
    busy: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    gap, end = 0, None
    for name, start, duration in events:
        kind = re.sub(r"[_.]?\d+$", "", name)
        busy[kind] += duration
        count[kind] += 1
        if end is not None and start > end:
            gap += start - end
        end = max(end or 0, start + duration)
    per_step = 1e-3 / max(steps, 1)
    return {
        "steps": steps,
        "busy_us_per_step": round(sum(busy.values()) * per_step, 1),
        "gaps_us_per_step": round(gap * per_step, 1),
        "kernels": [
            {
                "name": name,
                "us_per_step": round(total * per_step, 2),
                "calls_per_step": round(count[name] / max(steps, 1), 2),
            }
            for name, total in busy.most_common(TOP)
        ],
    }


def main() -> None:
    parser = engines.engine_parser(__doc__, prefix_cache=False)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with engines.start(engines.engine_config(arguments)) as llm:
        figures = {
            f"batch {batch}": measure(llm, batch, arguments.tokens)
            for batch in map(int, arguments.batches.split(","))
        }
        device = engines.device_name(llm.info)
    record.store("step_profile", device, figures)


if __name__ == "__main__":
    main()
