"""What keeping to a grammar costs and saves.

Run: python -m bench.structured MODEL [--load-format dummy] [--batch 32]

- Latency of an answer that is valid: constrained decoding against generating, parsing and trying
  again, one request at a time, same prompts and schemas.
- Tokens/s with a grammar in every row of a batch against none: (time for `--long` tokens - time for
  `--short`) / the difference, as bench.latency.
- Steps and seconds that forced tokens save when they go in as chunks.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import record
from bench.trace import make_prompts
from jaxserve import LLM, Grammar, SamplingParams
from jaxserve.constrained import matcher

try:
    import jsonschema
except ModuleNotFoundError:
    raise SystemExit("bench.structured needs jsonschema: pip install -e '.[bench]'") from None

SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": {
        "type": "object",
        "properties": {
            "full_name": {"type": "string", "maxLength": 30},
            "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
            "favourite_colour": {"enum": ["red", "green", "blue"]},
        },
        "required": ["full_name", "age_in_years", "favourite_colour"],
        "additionalProperties": False,
    },
    "an order of a shop": {
        "type": "object",
        "properties": {
            "order_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "ordered_items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {
                        "description": {"type": "string", "maxLength": 20},
                        "quantity": {"type": "integer", "minimum": 1, "maximum": 9},
                    },
                    "required": ["description", "quantity"],
                    "additionalProperties": False,
                },
            },
            "is_paid": {"type": "boolean"},
        },
        "required": ["order_number", "ordered_items", "is_paid"],
        "additionalProperties": False,
    },
}
ENDLESS = {"type": "array", "minItems": 1000, "items": SCHEMAS["a person"]}


def prompt_of(topic: str, schema: dict[str, Any], number: int) -> list[dict[str, str]]:
    text = (
        f"Make up {topic}, number {number}. Answer with nothing but JSON that this schema "
        f"describes, without code fences: {json.dumps(schema)}"
    )
    return [{"role": "user", "content": text}]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def summary(seconds: list[float], attempts: list[int], num_valid: int) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "mean_ms": round(statistics.mean(seconds) * 1e3, 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3, 1),
        "attempts": sum(attempts),
        "valid": num_valid,
        "requests": len(seconds),
    }


def compare_latency(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Constrained, and with retries up to `--attempts`; a warm-up of each schema is left out."""

    def run(ask: Callable[[list[dict[str, str]], dict[str, Any], int], tuple[bool, int]]):
        seconds: list[float] = []
        attempts: list[int] = []
        num_valid = 0
        for number in range(-1, arguments.requests):
            for topic, schema in SCHEMAS.items():
                start_s = time.perf_counter()
                valid, count = ask(prompt_of(topic, schema, number), schema, number)
                if number >= 0:
                    seconds.append(time.perf_counter() - start_s)
                    attempts.append(count)
                    num_valid += valid
        return summary(seconds, attempts, num_valid)

    def constrained(prompt: list[dict[str, str]], schema: dict[str, Any], number: int):
        params = SamplingParams(
            grammar=Grammar.json_schema(schema), max_tokens=arguments.max_tokens, seed=number
        )
        [output] = llm.chat(prompt, params)
        return is_valid(output.text, schema), 1

    def retried(prompt: list[dict[str, str]], schema: dict[str, Any], number: int):
        for attempt in range(arguments.attempts):
            params = SamplingParams(
                max_tokens=arguments.max_tokens, seed=number * arguments.attempts + attempt
            )
            [output] = llm.chat(prompt, params)
            if is_valid(output.text, schema):
                return True, attempt + 1
        return False, arguments.attempts

    return {"constrained": run(constrained), "parse and retry": run(retried)}


def compare_throughput(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of a full batch, all rows with a grammar that never ends, and all without."""
    figures: dict[str, Any] = {}
    seed = 0
    grammars = {"without": None, "with": Grammar.json_schema(ENDLESS)}
    jump, matcher.MIN_JUMP = matcher.MIN_JUMP, 1 << 30  # the cost of the masks alone
    for temperature in (0.0, 1.0):
        rates: dict[str, list[float]] = {name: [] for name in grammars}
        for _ in range(arguments.repeats + 1):
            for name, grammar in grammars.items():
                seconds: list[float] = []
                for tokens in (arguments.short, arguments.long):
                    seed += 1
                    prompts = make_prompts(arguments.batch, 64, seed, llm.info.vocab_size)
                    params = SamplingParams(
                        max_tokens=tokens, temperature=temperature, ignore_eos=True, grammar=grammar
                    )
                    start_s = time.perf_counter()
                    llm.generate(prompts, params)
                    seconds.append(time.perf_counter() - start_s)
                num_tokens = arguments.batch * (arguments.long - arguments.short)
                rates[name].append(num_tokens / (seconds[1] - seconds[0]))
        medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
        figures[f"temperature {temperature:g}"] = {
            "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
            "all": {name: [round(v, 1) for v in values] for name, values in rates.items()},
            "share": round(medians["with"] / medians["without"], 3),
        }
    matcher.MIN_JUMP = jump
    return figures


def compare_forcing(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers one at a time and in a batch, with forced tokens in chunks and one by one."""
    figures: dict[str, Any] = {}
    jump = matcher.MIN_JUMP
    for batch in (1, arguments.batch):
        prompts = [
            prompt_of(topic, schema, number)
            for number in range(max(1, batch // 2))
            for topic, schema in SCHEMAS.items()
        ]
        params = [
            SamplingParams(
                grammar=Grammar.json_schema(schema), temperature=0, max_tokens=arguments.max_tokens
            )
            for _ in range(max(1, batch // 2))
            for schema in SCHEMAS.values()
        ]
        rounds = [slice(0, batch), slice(1, 2)] if batch == 1 else [slice(0, None)]
        texts: dict[str, list[str]] = {}
        for name, least in (("one by one", 1 << 30), ("in chunks", jump)):
            matcher.MIN_JUMP = least
            found: list[str] = []
            for warm in (True, False):
                llm.flush_cache()
                before, start_s, found = llm.stats(), time.perf_counter(), []
                for part in rounds:
                    found += [o.text for o in llm.chat(prompts[part], params[part])]
                after, seconds = llm.stats(), time.perf_counter() - start_s
                if not warm:
                    figures[f"batch {batch}, {name}"] = {
                        "steps": after.num_steps - before.num_steps,
                        "tokens": after.generated_tokens - before.generated_tokens,
                        "forced": after.num_forced_tokens - before.num_forced_tokens,
                        "ms": round(seconds * 1e3, 1),
                    }
            texts[name] = found
        same = [a == b for a, b in zip(*texts.values(), strict=True)]
        figures[f"batch {batch}, same texts"] = f"{sum(same)} of {len(same)}"
    matcher.MIN_JUMP = jump
    return figures


PARTS = {
    "latency": compare_latency,
    "forced tokens": compare_forcing,
    "throughput": compare_throughput,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10, help="of each schema")
    parser.add_argument("--attempts", type=int, default=5, help="most of them, to parse and retry")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--short", type=int, default=96)
    parser.add_argument("--long", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(unknown)}; known are {', '.join(PARTS)}")
    with LLM(
        arguments.model,
        load_format=arguments.load_format,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.batch,
        on_progress=lambda progress: print(progress.stage, progress.text, flush=True),
    ) as llm:
        info = llm.info
        figures: dict[str, Any] = {}
        for part in parts:
            figures[part] = PARTS[part](llm, arguments)
            print(part, figures[part], flush=True)
        stats = llm.stats()
        compiled = stats.grammar_compile_seconds
        figures["grammars"] = {
            "compiled": compiled.count,
            "mean_compile_ms": round(compiled.total / compiled.count * 1e3, 2),
            "cache_hits": stats.num_grammar_hits,
        }
    device = record.cpu_name() if info.platform == "cpu" else info.device_kind
    record.store("structured", device, figures)


if __name__ == "__main__":
    main()
