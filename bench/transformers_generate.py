"""transformers' `generate` over the same GGUF, for `bench.against_transformers`; needs torch, not
jaxserve.

Run: python -P bench/transformers_generate.py PATH_TO_GGUF BATCH... ; prints one line of JSON.
A step is timed as (time for 72 tokens - time for 8) / 64, so that the prompt's own cost is left
out.
"""

import json
import pathlib
import statistics
import sys
import time

import torch
import transformers

PROMPT_TOKENS, SHORT, LONG, REPEATS = 32, 8, 72, 3


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    steps = {}
    for batch in map(int, sys.argv[2:]):
        ids = torch.randint(10, 40000, (batch, PROMPT_TOKENS), generator=generator)

        def generate(tokens: int, ids: torch.Tensor = ids) -> float:
            start = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            return time.perf_counter() - start

        generate(SHORT)
        times = [(generate(LONG) - generate(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS)]
        steps[batch] = statistics.median(times)
    print(
        json.dumps(
            {"ms_per_step": steps, "torch": torch.__version__, "threads": torch.get_num_threads()}
        )
    )


if __name__ == "__main__":
    main()
