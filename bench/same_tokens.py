"""Whether a device generates the tokens that it should: the reference's greedy ones in float32,
readable text in bfloat16, and under preemption those of an undisturbed run.

Run: python -m bench.same_tokens [MODEL] [--requests 500]
MODEL must be SmolLM2-135M-Instruct, whose greedy tokens tests/fixtures holds.
"""

import argparse
import json
import pathlib
from typing import Any

from bench import engines, record
from bench.workloads import trace_requests
from jaxserve import LLM, SamplingParams

FIXTURE = pathlib.Path(__file__).parent.parent / "tests" / "fixtures" / "smollm2_greedy.json"
VOCAB = 49152
TIE = 1e-3
"""Leads of the best logit below this are ties, which another order of summing may swap."""


def start(model: str, dtype: str, num_pages: int | None = None) -> LLM:
    return LLM(
        model,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=32,
        max_batched_tokens=512,
        num_pages=num_pages,
        prefix_cache=False,
    )


def against_reference(llm: LLM) -> dict[str, Any]:
    """The fixture's prompts: how many continue as transformers does in float32."""
    records = json.loads(FIXTURE.read_text())["records"]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    results = llm.generate([record["prompt"] for record in records], params)
    same, ties, differences = 0, 0, []
    for reference, result in zip(records, results, strict=True):
        pairs = zip(result.token_ids, reference["token_ids"], strict=True)
        index = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if index is None:
            same += 1
        elif reference["lead"][index] < TIE:
            ties += 1
        else:
            differences.append([reference["prompt"], index, reference["lead"][index]])
    return {
        "attention": llm.info.attention,
        "prompts": len(records),
        "same": same,
        "ties_swapped": ties,
        "different": len(differences),
        "first_differences": differences[:3],
        "texts": [result.text for result in results[:3]],
    }


def trace_tokens(
    llm: LLM, requests: list[tuple[list[int], int]]
) -> tuple[list[list[int]], dict[str, int]]:
    """What the requests, sent at once, generate; pages there were, and preemptions."""
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
    results = llm.generate([prompt for prompt, _ in requests], params)
    preemptions = llm.stats().num_preemptions
    return [r.token_ids for r in results], {
        "pages": llm.info.num_pages,
        "preemptions": preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--shrink", type=int, default=8)
    arguments = parser.parse_args()
    requests = trace_requests(arguments.requests, arguments.shrink, VOCAB)
    longest = max(len(prompt) + length for prompt, length in requests)
    figures: dict[str, Any] = {}
    with start(arguments.model, "float32") as llm:
        device = engines.device_name(llm.info)
        figures["float32"] = against_reference(llm)
        print(json.dumps(figures["float32"]), flush=True)
        undisturbed, ample = trace_tokens(llm, requests)
    with start(arguments.model, "float32", 2 * (longest // 16 + 2)) as llm:
        preempted, tiny = trace_tokens(llm, requests)
    figures["preemption"] = {
        "requests": len(requests),
        "output_tokens": sum(map(len, undisturbed)),
        "different": sum(a != b for a, b in zip(undisturbed, preempted, strict=True)),
        "ample": ample,
        "tiny": tiny,
    }
    print(json.dumps(figures["preemption"]), flush=True)
    with start(arguments.model, "bfloat16") as llm:
        figures["bfloat16"] = against_reference(llm)
    record.store("same_tokens", device, figures)


if __name__ == "__main__":
    main()
