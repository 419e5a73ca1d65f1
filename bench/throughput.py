"""The whole trace at once through `LLM.generate`, offline: how fast, and how full the steps were.

Run: python -m bench.throughput [MODEL] [--requests 500] [--shrink 1] [--load-format dummy]
Each request generates its own length of the trace, greedy, past ends of text. `--shrink` divides
the trace's lengths. One pass of a few other requests warms up.
"""

import argparse
import time
from typing import Any

from bench import engines, record
from bench.workloads import Request, trace_requests
from jaxserve import LLM, SamplingParams

WARM_UP_REQUESTS = 4


def generate_s(llm: LLM, requests: list[Request]) -> float:
    """Seconds until all requests, sent at once, have their tokens."""
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for _, length in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - start
    for output, (_, length) in zip(outputs, requests, strict=True):
        assert len(output.token_ids) == length, (output.request_id, output.finish_reason)
    return seconds


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    vocab = llm.info.vocab_size
    generate_s(llm, trace_requests(WARM_UP_REQUESTS, arguments.shrink, vocab, seed=1))
    requests = trace_requests(arguments.requests, arguments.shrink, vocab)
    before = llm.stats()
    wall_s = generate_s(llm, requests)
    after = llm.stats()
    input_tokens = sum(len(prompt) for prompt, _ in requests)
    output_tokens = sum(length for _, length in requests)
    return {
        "requests": len(requests),
        "shrink": arguments.shrink,
        "warm_up_requests": WARM_UP_REQUESTS,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(requests) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 1),
        "total_tokens_per_s": round((input_tokens + output_tokens) / wall_s, 1),
        "preemptions": after.num_preemptions - before.num_preemptions,
        "padding": engines.padding(before, after),
    }


def main() -> None:
    parser = engines.engine_parser(__doc__, prefix_cache=False)
    engines.add_process(parser)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--shrink", type=int, default=1)
    arguments = parser.parse_args()
    with engines.start(engines.engine_config(arguments), arguments.process) as llm:
        figures = measure(llm, arguments)
        figures["start"] = engines.start_figures(llm.info)
        device = engines.device_name(llm.info)
    record.store("throughput", device, figures)


if __name__ == "__main__":
    main()
