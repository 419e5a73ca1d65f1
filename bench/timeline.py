"""Where the time of the engine's steps goes, under `LLM.generate`: kernels, what is idle between
them, and what the host did.

Run: python -m bench.timeline [MODEL] [--load-format dummy] [--batches 1,64,256] [--prefill 1x2048]
The engine runs in a thread of this process, where JAX's profiler sees it, and which makes the host
slower than it is in service; while it records XLA uses no command buffers. `gap_us`: idle time of a
step; `between_steps`: that from its last layer's attention to the first layer's of the next step,
with the head, sampling and the embedding between. Kernels may overlap: `busy_us` counts both. Of a
prefill: milliseconds from the call of `generate` to the first kernel, to the last, and to the end.
"""

import collections
from typing import Any

import jax

from bench import engines, record
from bench.device_events import Event, Recording, recorded
from bench.step import summary
from bench.trace import make_prompts
from checkpoints.resolve import resolve
from jaxserve import LLM, SamplingParams
from jaxserve.models.config import ModelConfig

ATTENTION = "paged_decode"
"""Begins the name of the kernel that a decode step runs once a layer."""
CALL = "generate"


def generate(llm: LLM, count: int, length: int, max_tokens: int) -> Recording:
    """What happens from before the prompts are sent until nothing is in flight: to start or stop
    the profiler amid kernels makes them fail (JAX 0.11.2)."""
    prompts = make_prompts(count, length, count, llm.info.vocab_size)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts[::-1], sampling)  # warm

    def run():
        with jax.profiler.TraceAnnotation(CALL):
            llm.generate(prompts, sampling)

    return recorded(run)


def prefill_figures(found: Recording) -> dict[str, Any]:
    [(_, call, duration)] = [
        event for events in found.host.values() for event in events if event[0] == CALL
    ]
    kernels = [event for event in found.kernels if not event[0].startswith("Mem")]
    end = max(start + length for _, start, length in kernels)
    return {
        "first_kernel_ms": round((kernels[0][1] - call) / 1e6, 2),
        "last_kernel_ms": round((end - call) / 1e6, 2),
        "end_ms": round(duration / 1e6, 2),
        **summary(kernels, 1),
        "host_us": busiest_threads(found.host, 1),
    }


def figures(found: Recording, num_layers: int) -> dict[str, Any]:
    """Microseconds a step of those amid the decoding, by kernel and for what lies between."""
    attention = [i for i, event in enumerate(found.kernels) if event[0].startswith(ATTENTION)]
    middle = len(attention) // num_layers // 3 * num_layers
    kernels = found.kernels[attention[middle] : attention[2 * middle]]
    steps = sum(name.startswith(ATTENTION) for name, _, _ in kernels) / num_layers
    between: list[int] = []
    gaps: list[tuple[int, str]] = []
    num_attention, since_attention, end = 0, 0, kernels[0][1]
    for name, start, duration in kernels:
        gap = max(0, start - end)
        gaps.append((gap, name))
        since_attention += gap
        if name.startswith(ATTENTION):
            if num_attention and num_attention % num_layers == 0:
                between.append(since_attention)
            num_attention += 1
            since_attention = 0
        end = max(end, start + duration)
    return {
        "steps": round(steps, 1),
        "step_us": round((end - kernels[0][1]) / steps / 1e3, 1),
        "between_steps": record.spread([gap / 1e9 for gap in between]),
        "largest_gaps_us": [[gap // 1000, name[:50]] for gap, name in sorted(gaps)[-12:]],
        **summary(kernels, round(steps)),
        "host_us": busiest_threads(found.host, steps),
    }


def busiest_threads(host: dict[str, list[Event]], steps: float) -> dict[str, Any]:
    """Microseconds and number a step of what the host did most; what is nested counts twice."""
    threads: list[tuple[int, str, dict[str, Any]]] = []
    for thread, events in host.items():
        times: collections.Counter[str] = collections.Counter()
        counts = collections.Counter(name for name, _, _ in events)
        for name, _, duration in events:
            times[name] += duration
        shown = {
            name[:60]: [round(total / steps / 1e3, 1), round(counts[name] / steps, 2)]
            for name, total in times.most_common(16)
        }
        threads.append((sum(times.values()), thread, shown))
    threads.sort(key=lambda found: -found[0])
    return {thread: shown for _, thread, shown in threads[:6]}


def main() -> None:
    parser = engines.engine_parser(__doc__, prefix_cache=False)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=180)
    parser.add_argument("--prefill", default="")
    arguments = parser.parse_args()
    config = engines.engine_config(arguments)
    with engines.start(config, "thread") as llm:
        name = engines.device_name(llm.info)
        layers = ModelConfig.from_hf(resolve(arguments.model).config).num_layers
        found = {}
        for batch in map(int, arguments.batches.split(",")):
            recording = generate(llm, batch, arguments.input_len, arguments.output_len)
            found[f"batch {batch}"] = figures(recording, layers)
            print(batch, found[f"batch {batch}"], flush=True)
        for case in filter(None, arguments.prefill.split(",")):
            count, length = map(int, case.split("x"))
            found[f"prefill {case}"] = prefill_figures(generate(llm, count, length, 1))
            print(case, found[f"prefill {case}"], flush=True)
    record.store("timeline", name, found)


if __name__ == "__main__":
    main()
