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


def against_reference(model: str, dtype: str) -> dict[str, Any]:
    """The fixture's prompts: how many continue as transformers does in float32."""
    records = json.loads(FIXTURE.read_text())["records"]
    with LLM(model, dtype=dtype, max_num_seqs=32, max_batched_tokens=512) as llm:
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        results = llm.generate([record["prompt"] for record in records], params)
        found = {"device": engines.device_name(llm.info), "attention": llm.info.attention}
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
        **found,
        "prompts": len(records),
        "same": same,
        "ties_swapped": ties,
        "different": len(differences),
        "first_differences": differences[:3],
        "texts": [result.text for result in results[:3]],
    }


def under_preemption(model: str, count: int, shrink: int) -> dict[str, Any]:
    """The trace at once in ample and in tiny KV memory: preemptions, and requests whose tokens
    differ."""
    requests = trace_requests(count, shrink, VOCAB)
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
    tokens, figures = {}, {}
    longest = max(len(prompt) + length for prompt, length in requests)
    for name, pages in (("ample", None), ("tiny", 4 * (longest // 16 + 2))):
        with LLM(
            model,
            dtype="float32",
            max_num_seqs=64,
            max_batched_tokens=512,
            num_pages=pages,
            prefix_cache=False,
        ) as llm:
            tokens[name] = [result.token_ids for result in llm.generate(prompts, params)]
            stats = llm.stats()
            figures[name] = {"pages": llm.info.num_pages, "preemptions": stats.num_preemptions}
    pairs = list(zip(tokens["ample"], tokens["tiny"], strict=True))
    figures["requests"] = len(pairs)
    figures["output_tokens"] = sum(len(a) for a, _ in pairs)
    figures["different"] = sum(a != b for a, b in pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--shrink", type=int, default=8)
    arguments = parser.parse_args()
    figures = {
        "float32": against_reference(arguments.model, "float32"),
        "bfloat16": against_reference(arguments.model, "bfloat16"),
        "preemption": under_preemption(arguments.model, arguments.requests, arguments.shrink),
    }
    record.store("same_tokens", figures["float32"]["device"], figures)


if __name__ == "__main__":
    main()
