"""How long an engine takes from nothing to ready: cold, with no compiled steps kept, then warm.

Each start is that of a new process and of its engine's, as `jaxserve serve` has them.

Run: python -m bench.start MODEL [--load-format dummy] [--warm-starts 2]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench import engines, record
from jaxserve import LLM, SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS = 100, 8


def start_once(arguments: argparse.Namespace) -> None:
    """Starts an engine in a process of its own and answers two requests; prints what that took."""
    with LLM(engines.engine_config(arguments), process="spawn") as llm:
        ready_at_s = time.monotonic()
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        answers_s = []
        for token in (1, 2):
            began = time.monotonic()
            llm.generate([[token] * PROMPT_TOKENS], params)
            answers_s.append(round(time.monotonic() - began, 3))
        info = llm.info
    figures = {
        "ready_at_s": ready_at_s,
        "device": engines.device_name(info),
        "engine_s": round(info.startup_s, 2),
        "weights_s": round(info.load_s, 2),
        "programs_s": round(info.compile_s, 2),
        "programs": engines.program_counts(info),
        "first_answer_s": answers_s[0],
        "second_answer_s": answers_s[1],
        "num_pages": info.num_pages,
        "attention": info.attention,
    }
    print(json.dumps(figures))


def measure(command: list[str], folder: str) -> dict[str, Any]:
    """One start with its compiled steps in `folder`; `ready_s` counts from the command to Ready."""
    # what JAX itself may be told to keep would make cold starts warm
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "bench.start", *command, "--once", "--compile-cache", folder],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    return {"ready_s": round(figures.pop("ready_at_s") - began, 2), **figures}


def main() -> None:
    parser = engines.engine_parser(__doc__)
    parser.add_argument("--warm-starts", type=int, default=2)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        start_once(arguments)
        return
    if arguments.compile_cache is not None:
        parser.error("--compile-cache is this bench's own: an empty folder")
    with tempfile.TemporaryDirectory(prefix="jaxserve-start-") as folder:
        figures: dict[str, Any] = {"cold": measure(sys.argv[1:], folder)}
        kept = [path.stat().st_size for path in pathlib.Path(folder).glob("*.program")]
        figures["kept"] = {"files": len(kept), "mb": round(sum(kept) / 1e6, 1)}
        for count in range(arguments.warm_starts):
            figures[f"warm {count + 1}"] = measure(sys.argv[1:], folder)
    device = figures["cold"]["device"]
    for name in figures.keys() - {"kept"}:
        del figures[name]["device"]
    record.store("start", device, figures)


if __name__ == "__main__":
    main()
