"""What the benches that run an engine share: its options, how it is named, what its steps left
empty."""

import argparse
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from bench import record
from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.entry import cli
from jaxserve.types import BucketStats, EngineInfo, EngineStats


def engine_parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of MODEL and every field of EngineConfig, as `jaxserve serve` has them; `defaults`
    are this bench's own."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    group = parser.add_argument_group("engine", "defaults, where none is given, are the engine's")
    for flag in cli.ENGINE_FLAGS:
        union = isinstance(flag.hint, types.UnionType)
        kinds = typing.get_args(flag.hint) if union else (flag.hint,)
        settings: dict[str, Any] = {"type": kinds[0]}
        if kinds[0] is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kinds[0]) is typing.Literal:
            settings = {"choices": typing.get_args(kinds[0])}
        default = defaults.pop(flag.name, None)
        shown = "" if default is None else f" (here: {default})"
        text = (flag.help + shown).replace("%", "%%")
        name = "--" + flag.name.replace("_", "-")
        group.add_argument(name, help=text, default=default, **settings)
    assert not defaults, f"no settings of the engine: {', '.join(defaults)}"
    return parser


def add_process(parser: argparse.ArgumentParser) -> None:
    """`--process`, of a bench that can run its engine either way."""
    parser.add_argument(
        "--process",
        choices=("thread", "spawn"),
        default="spawn",
        help="whether the engine runs in a thread here or, as a server's does, in a process of its "
        "own (default: spawn)",
    )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's part of the arguments. Raises: ConfigError."""
    fields = dict(vars(arguments))
    return cli.engine_config(fields.pop("model"), fields)


def start(config: EngineConfig, process: Literal["thread", "spawn"]) -> LLM:
    """The engine, ready; prints what its start does."""
    return LLM(
        config,
        process=process,
        on_progress=lambda told: print(told.stage, told.text, flush=True),
    )


def device_name(info: EngineInfo) -> str:
    return record.cpu_name() if info.platform == "cpu" else info.device_kind


def program_counts(info: EngineInfo) -> dict[str, float]:
    return {k: round(v, 2) for k, v in msgspec.structs.asdict(info.programs).items()}


def start_figures(info: EngineInfo) -> dict[str, Any]:
    return {
        "startup_s": round(info.startup_s, 1),
        "compile_s": round(info.compile_s, 1),
        "num_compiled": info.num_compiled,
        "programs": program_counts(info),
        "num_pages": info.num_pages,
        "attention": info.attention,
    }


def padding(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Of the steps between two readings: steps, tokens, and the share of the steps' room for tokens
    that was padding; in all, by kind, and by compiled shape."""
    earlier = {(bucket.kind, bucket.size): bucket for bucket in before.buckets}
    used: list[BucketStats] = []
    for bucket in sorted(after.buckets, key=lambda bucket: (bucket.kind, bucket.size)):
        old = earlier.get((bucket.kind, bucket.size), BucketStats(bucket.kind, bucket.size, 0, 0))
        num_steps = bucket.num_steps - old.num_steps
        num_tokens = bucket.num_tokens - old.num_tokens
        if num_steps:
            used.append(BucketStats(bucket.kind, bucket.size, num_steps, num_tokens))
    return {
        "all": _share(used),
        "by kind": {
            kind: _share(bucket for bucket in used if bucket.kind == kind)
            for kind in sorted({bucket.kind for bucket in used})
        },
        "by shape": {f"{bucket.kind} {bucket.size}": _share([bucket]) for bucket in used},
    }


def _share(buckets: Iterable[BucketStats]) -> dict[str, Any]:
    buckets = list(buckets)
    room = sum(bucket.size * bucket.num_steps for bucket in buckets)
    return {
        "steps": sum(bucket.num_steps for bucket in buckets),
        "tokens": sum(bucket.num_tokens for bucket in buckets),
        "padding_share": round(sum(bucket.num_padding for bucket in buckets) / max(room, 1), 4),
    }
