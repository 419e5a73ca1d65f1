"""Decoding on a CPU beside transformers' `generate`: same machine, same weights, same run, in
turns.

Run: python -m bench.against_transformers --torch-python PYTHON   (an interpreter that has torch and
transformers) jaxserve is timed through `LLM.generate`, so that its whole loop counts: (time for 72
tokens - time for 8) / 64.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from bench import record
from bench.trace import make_prompts
from checkpoints.resolve import resolve
from jaxserve import LLM, SamplingParams

PROMPT_TOKENS, SHORT, LONG, REPEATS = 32, 8, 72, 3
BATCHES = (1, 16)


def jaxserve_steps(model: str) -> dict[int, float]:
    """Milliseconds a step, by batch."""
    steps = {}
    with LLM(model, process="spawn", prefix_cache=False) as llm:
        for batch in BATCHES:
            prompts = make_prompts(batch, PROMPT_TOKENS, 0, 40000)

            def generate(tokens: int, prompts: list[list[int]] = prompts) -> float:
                start = time.perf_counter()
                params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
                llm.generate(prompts, params)
                return time.perf_counter() - start

            generate(SHORT)
            times = [
                (generate(LONG) - generate(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS)
            ]
            steps[batch] = statistics.median(times)
    return steps


def transformers_steps(python: str, gguf: str) -> dict[int, float]:
    script = pathlib.Path(__file__).with_name("transformers_generate.py")
    command = [python, "-P", str(script), gguf, *map(str, BATCHES)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(output.strip().splitlines()[-1])
    return {int(batch): ms for batch, ms in found["ms_per_step"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    sys.argv[1:] = ["--torch-python", "PYTHON", "--rounds", str(arguments.rounds)]  # as recorded
    gguf = str(resolve(arguments.model).path)
    theirs: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    ours: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(arguments.rounds):
        for batch, ms in transformers_steps(arguments.torch_python, gguf).items():
            theirs[batch].append(ms)
        for batch, ms in jaxserve_steps(arguments.model).items():
            ours[batch].append(ms)
    our = {batch: statistics.median(times) for batch, times in ours.items()}
    their = {batch: statistics.median(times) for batch, times in theirs.items()}
    figures = {
        "ms_per_step": {"jaxserve": ours, "transformers": theirs},
        "batch 1, share of transformers' step": round(our[1] / their[1], 3),
        "16 streams, tokens/s over transformers one at a time": round(
            (16 / our[16]) / (1 / their[1]), 2
        ),
        "batch 16, share of transformers' static batch step": round(our[16] / their[16], 3),
    }
    record.store("against_transformers", record.cpu_name(), figures)


if __name__ == "__main__":
    main()
