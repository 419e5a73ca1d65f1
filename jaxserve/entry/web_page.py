"""The page at /, and /engine_state, what it shows of the engine. Imports no jax."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import fastapi
import msgspec
from fastapi import Response

from jaxserve.entry.front import Front
from jaxserve.entry.http_io import json_response
from jaxserve.observation import EngineState, PrefixNode

FOLDER = pathlib.Path(__file__).parent / "web"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "controls.json": "application/json",
}
OPEN_PATHS = ("/", *(f"/web/{name}" for name in FILES))
"""Served without a key: they say nothing of the engine, and ask for the key."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
TEXT_CHARACTERS = 80
STATS = (
    "num_running", "num_waiting", "pages_used", "pages_cached", "pages_total", "num_steps",
    "num_preemptions", "prompt_tokens", "cached_tokens", "generated_tokens",
)  # fmt: skip


def add_routes(app: fastapi.FastAPI, front: Front) -> None:
    for name in FILES:
        app.get(f"/web/{name}", include_in_schema=False)(functools.partial(_file, name))
    app.get("/", include_in_schema=False)(functools.partial(_file, "index.html"))

    @app.get("/engine_state")
    async def engine_state() -> Response:
        client = front.engine()
        state, stats = await client.state(), client.stats()
        text: Callable[[Sequence[int]], str] | None = None
        if front.logs_text and client.model.tokenizer is not None:
            text = functools.partial(client.model.tokenizer.decode, skip_special_tokens=False)
        return json_response(
            {
                "model": front.model_name,
                "device": front.info.device_kind,
                "now_s": state.now_s,
                "stats": {name: getattr(stats, name) for name in STATS},
                "sequences": msgspec.to_builtins(state.sequences),
                "steps": msgspec.to_builtins(state.steps),
                "prefixes": prefixes(state, text),
            }
        )


async def _file(name: str) -> Response:
    return Response(_read(name), media_type=FILES[name], headers=HEADERS)


@functools.cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def prefixes(state: EngineState, text: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """The prefix tree's most hit runs of pages, each after the one above it: pages that follow one
    another without a branch and were hit and are held as often as each other. `text`, if given,
    makes text of a run's first tokens."""
    children: dict[int, list[PrefixNode]] = {}
    for node in state.prefix_nodes:
        children.setdefault(node.above, []).append(node)
    runs: list[dict[str, Any]] = []
    waiting = [(node, 0) for node in reversed(children.get(0, []))]
    while waiting:
        first, above = waiting.pop()
        last, token_ids, pages = first, list(first.token_ids), 1
        while len(below := children.get(last.page, [])) == 1 and (
            (below[0].hits, below[0].num_holders) == (first.hits, first.num_holders)
        ):
            last = below[0]
            token_ids += last.token_ids
            pages += 1
        run: dict[str, Any] = {
            "id": first.page,
            "above": above,
            "pages": pages,
            "tokens": len(token_ids),
            "hits": first.hits,
            "holders": first.num_holders,
        }
        if text is not None:
            run["text"] = text(token_ids[:TEXT_CHARACTERS])[:TEXT_CHARACTERS]
        runs.append(run)
        waiting += [(node, first.page) for node in reversed(children.get(last.page, []))]
    return {"pages": state.num_prefix_pages, "runs": runs}
