"""Writes docs/parameter_table.md from the schemas themselves: python -m docs.parameter_table

A test holds the page to it, and each cell to what the servers do.
"""

import dataclasses
import inspect
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pydantic

from jaxserve.entry import embeddings, responses, sglang
from jaxserve.entry import openai_schema as schema
from jaxserve.entry.client import Client
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.types import RANGES, SamplingParams

PAGE = pathlib.Path(__file__).with_name("parameter_table.md")
WORKS, REFUSED, LABEL, NONE = "works", "refused", "label", "—"
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that say something of a request and change nothing of its answer."""
NESTED = {"sampling", "sampling_params"}
"""Fields whose own fields are listed in their place."""
NAMES = {
    **{sglang.NAMES[ours]: ours for ours in sglang.NAMES},
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "return_logprob": "logprobs",
    "logprob_start_len": "prompt_logprobs",
    "rid": "request_id",
    "bad_words_ids": "bad_words",
    "input": "prompt",
    "input_ids": "prompt",
    "tokens": "prompt",
    "prompts": "prompt",
    "text": "prompt",
    "template": "chat_template_kwargs",
    **dict.fromkeys(
        (
            "response_format", "structured_outputs", "guided_json", "guided_regex",
            "guided_choice", "guided_grammar", "json_schema", "json_object", "regex", "ebnf",
            "choice", "structural_tag",
        ),
        "grammar",
    ),
}  # fmt: skip
"""What other surfaces call a parameter that has a row of another name."""


@dataclasses.dataclass(frozen=True)
class Surface:
    """A way in: the names that it knows, with what becomes of each."""

    title: str
    fields: Mapping[str, str]
    """WORKS, REFUSED or LABEL."""


def of_body(
    title: str, *bodies: type[pydantic.BaseModel], rename: Mapping[str, str] | None = None
) -> Surface:
    """`rename`: names that mean something else here than in NAMES."""
    fields: dict[str, str] = {}
    for body in bodies:
        properties = body.model_json_schema()["properties"]
        for name in properties.keys() - NESTED:
            description = properties[name].get("description", "")
            is_refused = description.startswith("Not supported")
            kind = REFUSED if is_refused else LABEL if name in LABELS else WORKS
            fields[(rename or {}).get(name, name)] = kind
    return Surface(title, fields)


def of_message(title: str, *messages: Any) -> Surface:
    """`messages`: descriptors."""
    names = {field.name for message in messages for field in message.fields} - NESTED
    return Surface(title, {name: LABEL if name in LABELS else WORKS for name in names})


def of_python(title: str) -> Surface:
    names = set(SamplingParams.__struct_fields__)
    for verb in (Client.open, Client.generate, Client.chat):
        names |= inspect.signature(verb).parameters.keys()
    inner = {"self", "params", "on_finish", "queue", "default_max_tokens", "pooling", "until",
             "conversations"}  # fmt: skip
    return Surface(title, dict.fromkeys(names - inner, WORKS))


def surfaces() -> list[Surface]:
    return [
        of_body("`/v1/completions`", schema.CompletionRequest),
        of_body("`/v1/chat/completions`", schema.ChatRequest),
        of_body(
            "`/v1/responses`", responses.ResponsesRequest,
            rename={"text": "response_format", "prompt": "prompt (a template)"},
        ),
        of_body("`/generate`", sglang.GenerateRequest, sglang.SglangSampling),
        of_body("`/v1/embeddings`", embeddings.EmbeddingRequest),
        of_message("gRPC `Generate`", pb.GenerateRequest.DESCRIPTOR, pb.SamplingParams.DESCRIPTOR),
        of_message("gRPC `Chat`", pb.ChatRequest.DESCRIPTOR, pb.SamplingParams.DESCRIPTOR),
        of_python("Python"),
    ]  # fmt: skip


def cell(surface: Surface, row: str) -> str:
    """What a surface does of a parameter, under which names."""
    names = sorted(n for n in surface.fields if NAMES.get(n, n) == row)
    working = [n for n in names if surface.fields[n] != REFUSED]
    if not working:
        return REFUSED if names else NONE
    kind = LABEL if all(surface.fields[n] == LABEL for n in working) else WORKS
    if working == [row]:
        return kind
    told = ", ".join(f"`{n}`" for n in working)
    return told if kind == WORKS else f"{kind}: {told}"


def rows(given: Iterable[Surface]) -> list[str]:
    """SamplingParams' own first, in their order."""
    found = {NAMES.get(name, name) for surface in given for name in surface.fields}
    first = [name for name in SamplingParams.__struct_fields__ if name in found]
    return [*first, *sorted(found - set(first))]


def allowed(row: str) -> tuple[str, str]:
    """(default, range) as SamplingParams has them."""
    default = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}.get(row)
    is_plain = isinstance(default, bool | int | float | str)
    words = str(RANGES[row]) if row in RANGES else ""
    return (str(default).lower() if is_plain else ""), words


def page() -> str:
    """The page's text."""
    given = surfaces()
    lines = [
        "# Every parameter, everywhere",
        "",
        "Written by `python -m docs.parameter_table` from the schemas; a test sends each.",
        "What they do: [parameters.md](parameters.md).",
        "",
        f"- **{WORKS}**, or the name that it has there: what it says is done, or the request is "
        "refused with a 400 (INVALID_ARGUMENT) that names it.",
        f"- **{REFUSED}**: known elsewhere; a value other than one that asks for nothing is a 400 "
        "that names it.",
        f"- **{LABEL}**: says something of the request, in the log line or given back, and changes "
        "nothing of what is generated.",
        f"- **{NONE}**: no field of this name; it is a 400 that names it, too.",
        "",
        "| parameter | default | range | " + " | ".join(s.title for s in given) + " |",
        "|---" * (3 + len(given)) + "|",
    ]
    for row in rows(given):
        default, words = allowed(row)
        cells = [cell(surface, row) for surface in given]
        lines.append(f"| `{row}` | {default} | {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
