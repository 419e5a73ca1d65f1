"""Metrics of a real engine under load: each moves as it should, and Prometheus gives the
dashboard's queries data."""

import asyncio
import dataclasses
import io
import itertools
import json
import math
import pathlib
import re
import shutil
import socket
import subprocess

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine import start
from jaxserve.entry.client import Client
from jaxserve.entry.serve import Server
from jaxserve.scheduler.scheduler import Scheduler

DASHBOARD = pathlib.Path(__file__).parents[2] / "docs" / "grafana" / "jaxserve.json"
DOCS = DASHBOARD.parents[1] / "observability.md"
PROMETHEUS = shutil.which("prometheus")
LIMITS = {"max_num_seqs": 4, "max_batched_tokens": 32, "num_pages": 64, "max_queue": 6}
PAGES = 40
"""That the scheduler hands out; steps are compiled for as many as in other tests, to share them."""
MOST = 10
"""Requests in flight at once, by these."""
FOUR = "Four ways"
SHARED = "Once upon a time in a town by the sea there was a lighthouse. "
NUMBERS = itertools.count()
"""For grammars that no load had before."""
Samples = dict[tuple[str, ...], float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tiny_folder):
    def make_client(config, observer, on_progress):
        return Client(config, process="thread", observer=observer, on_progress=on_progress)

    def few_pages(config):
        return Scheduler(dataclasses.replace(config, num_pages=PAGES))

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(start, "Scheduler", few_pages)
    config = EngineConfig(model=str(tiny_folder), **LIMITS)
    server = Server(config, ServerConfig(port=0), make_client=make_client, out=io.StringIO())
    task = asyncio.ensure_future(server.run())
    try:
        async with asyncio.timeout(240):
            await server.ready.wait()
        assert server.addresses is not None
        url = f"http://127.0.0.1:{server.addresses.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield http
    finally:
        monkeypatch.undo()
        server.stop()
        server.stop()
        async with asyncio.timeout(30):
            await task


async def scrape(http: httpx.AsyncClient) -> tuple[Samples, dict[str, str]]:
    """Values by name and labels (but the model's), and the families' types by name."""
    values: Samples = {}
    types: dict[str, str] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        types[family.name.removeprefix("jaxserve_")] = family.type
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le")]
            if "le" not in sample.labels:
                values[(sample.name.removeprefix("jaxserve_"), *labels)] = sample.value
    return values, types


class Load:
    """Some of everything that a server meets, and what came of it."""

    def __init__(self, http: httpx.AsyncClient):
        self._http = http
        self.answers: list[dict] = []
        self.num_refused = 0

    async def ask(self, **body) -> None:
        body = {"temperature": 0, "max_tokens": 40, **body}
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            self.num_refused += 1
        else:
            assert answer.status_code == 200, answer.text
            self.answers.append(answer.json())

    async def leave(self) -> None:
        """A client that goes away after some tokens."""
        body = {"prompt": "Go on", "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            for _ in range(6):
                await anext(lines)

    async def run(self) -> None:
        long = {"max_tokens": 100, "ignore_eos": True}
        await asyncio.gather(*(self.ask(prompt=f"{SHARED}{i}", **long) for i in range(5)))
        # needs 64 pages in the end
        await self.ask(prompt=FOUR, n=4, max_tokens=245, ignore_eos=True, seed=3, temperature=1)
        new = next(NUMBERS)
        for pattern in (f"[ab]{{3}} and {new}", f"[ab]{{3}} and {new}", f"a{{2}}{new}"):
            await self.ask(prompt="Say", guided_regex=pattern)
        refused = await self._http.post(
            "/v1/completions", json={"prompt": "x", "guided_regex": f"a[{new}"}
        )
        assert refused.status_code == 400
        await self.leave()
        many = (self.ask(prompt="More " * 8, max_tokens=100) for _ in range(MOST + 4))
        await asyncio.gather(*many)

    @property
    def num_generated(self) -> int:
        return sum(answer["usage"]["completion_tokens"] for answer in self.answers)


async def idle(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await scrape(http))[0]["num_requests_running",]:
            await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
async def test_under_load_every_metric_moves_as_it_should(http):
    before, types = await scrape(http)
    load = Load(http)
    peak: Samples = {}

    async def watch() -> None:
        while True:
            for name, value in (await scrape(http))[0].items():
                peak[name] = max(peak.get(name, -math.inf), value)
            state = (await http.get("/engine_state")).json()
            assert len(state["sequences"]) <= LIMITS["max_num_seqs"] + 32
            peak["sequences",] = max(peak.get(("sequences",), 0), len(state["sequences"]))
            await asyncio.sleep(0.03)

    watching = asyncio.ensure_future(watch())
    await load.run()
    watching.cancel()
    [end] = await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(end, asyncio.CancelledError), repr(end)
    await idle(http)
    after, _ = await scrape(http)
    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    seen: set[str] = set()

    def has(expected: float | tuple[float, float], name: str, *labels: str) -> None:
        low, high = expected if isinstance(expected, tuple) else (expected, expected)
        got = moved[name, *labels]
        assert low <= got <= high, f"{name} {labels} moved by {got}, not {low} to {high}"
        family = re.sub(r"_(count|sum)$", "", name)
        seen.add(family if family in types else family.removesuffix("_total"))

    ended = len(load.answers)
    some = (1, math.inf)
    seconds = (1e-9, 600)
    assert load.num_refused >= 1
    has(load.num_refused, "admission_rejections_total")
    has(ended + 1, "http_responses_total", "/v1/completions", "200")  # one left
    has(1, "http_responses_total", "/v1/completions", "400")
    has(load.num_refused, "http_responses_total", "/v1/completions", "429")
    has(some, "http_responses_total", "/metrics", "200")
    has(1, "request_success_total", "abort")
    has(1, "request_success_total", "error")
    has((0, ended), "request_success_total", "stop")
    has(ended - moved["request_success_total", "stop"], "request_success_total", "length")
    num_choices = ended + 3 + 2  # one had four, one left, one was refused for its grammar
    has(ended + 2, "request_params_n_count")
    has(num_choices, "request_params_n_sum")
    has(ended + 1, "request_params_max_tokens_count")  # the refused one gave none
    has(ended + 2, "request_prompt_tokens_count")
    has(ended + 2, "e2e_request_latency_seconds_count")
    for part in ("queue", "prefill", "decode", "inference"):
        has(ended + 1, f"request_{part}_time_seconds_count")
        has(seconds, f"request_{part}_time_seconds_sum")
    has(ended + 1, "time_to_first_token_seconds_count")
    has(seconds, "time_to_first_token_seconds_sum")
    has((1, ended + 1), "request_time_per_output_token_seconds_count")
    for name in ("request_generation_tokens", "request_max_num_generation_tokens"):
        has(ended + 2, f"{name}_count")
    generated = load.num_generated
    left = (0, 200)  # what the client that left had been given
    has((generated, generated + left[1]), "request_generation_tokens_sum")
    one_choice = generated - 3 * 245
    has((one_choice, one_choice + left[1]), "request_max_num_generation_tokens_sum")
    has((generated, generated + left[1]), "generation_tokens_total")
    has((1, moved["generation_tokens_total",] - ended), "inter_token_latency_seconds_count")
    prompts = sum(answer["usage"]["prompt_tokens"] for answer in load.answers)
    has(some, "request_prefill_kv_computed_tokens_sum")
    more = 3 * len(FOUR) + len("Go on")  # three choices more, and one that left
    has(prompts + more, "prompt_tokens_total")
    has(prompts + more, "prefix_cache_queries_total")
    cached = sum(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in load.answers
    )
    assert cached > 0
    has((cached, prompts), "prefix_cache_hits_total")
    has(moved["prefix_cache_hits_total",], "prompt_tokens_cached_total")
    has((generated + prompts - cached - 200, math.inf), "computed_tokens_total")
    has(some, "evicted_tokens_total")
    has(some, "num_preemptions_total")
    has(4, "num_grammar_total")
    has(1, "num_grammar_cache_hit_total")
    has(1, "num_grammar_aborted_total")
    has(0, "num_grammar_timeout_total")
    has(3, "grammar_compilation_time_seconds_count")
    has(some, "grammar_forced_tokens_total")
    has(0, "corrupted_requests_total")
    has(0, "compiles_total", "runtime")
    has(0, "compile_seconds_total", "runtime")
    steps = moved["steps_total",]
    has(some, "steps_total")
    assert sum(v for k, v in moved.items() if k[0] == "bucket_steps_total") == steps
    assert sum(v for k, v in moved.items() if k[0] == "step_time_seconds_count") == steps
    has(steps, "iteration_tokens_total_count")
    has(moved["computed_tokens_total",], "iteration_tokens_total_sum")
    has((steps // 2, steps), "host_gap_seconds_count")
    room = tokens = padding = 0.0
    for (name, *labels), value in moved.items():
        if name == "bucket_steps_total":
            room += value * int(labels[1])
            has((0, math.inf), name, *labels)
        for kind in ("tokens", "padding_tokens"):
            if name == f"bucket_{kind}_total":
                has((0, math.inf), name, *labels)
        tokens += value * (name == "bucket_tokens_total")
        padding += value * (name == "bucket_padding_tokens_total")
    assert room == tokens + padding
    has(seconds, "step_time_seconds_sum", "decode")

    assert peak["num_requests_running",] == LIMITS["max_num_seqs"]
    assert peak["sequences",] > 0  # looks are few: they may miss the moments with most
    assert 0 < peak["num_requests_waiting",] <= MOST
    assert 0.5 < peak["kv_cache_usage_perc",] <= 1
    pages = [after["kv_cache_pages", state] for state in ("used", "cached", "free")]
    assert sum(pages) == PAGES - 1
    assert pages[0] == 0
    assert pages[1] > 0
    assert after["prefix_cache_hit_ratio",] == pytest.approx(
        after["prefix_cache_hits_total",] / after["prompt_tokens_total",]
    )
    constant = {
        "kv_cache_bytes", "weight_bytes", "startup_time_seconds", "cache_config_info",
    }  # fmt: skip
    assert all(value > 0 for name, value in after.items() if name[0] in constant)
    gauges = {name for name, kind in types.items() if kind == "gauge"}
    counted = set(types) - gauges
    assert counted <= seen, f"nothing is said of {sorted(counted - seen)}"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_docs_list_every_metric_as_it_is(http):
    table = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), help)
        for name, kind, labels, help in re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", DOCS.read_text(), re.M
        )
    }
    await Load(http).ask(prompt="x", max_tokens=2)
    found = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        labels = {label for sample in family.samples for label in sample.labels}
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = tuple(sorted(labels - {"model_name", "le"}))
        found[name] = (family.type, shown, family.documentation)
    rows = "\n".join(
        f"| `{name}` | {kind} | {' '.join(f'`{one}`' for one in labels)} | {help} |"
        for name, (kind, labels, help) in found.items()
    )
    assert table == found, f"the table in {DOCS.name} should be:\n{rows}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (apt-get install prometheus)")
@pytest.mark.asyncio(loop_scope="module")
async def test_every_query_of_the_dashboard_has_data(http, tmp_path):
    assert PROMETHEUS is not None
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "scrape_configs": [
            {
                "job_name": "jaxserve",
                "static_configs": [{"targets": [http.base_url.netloc.decode()]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}/api/v1", timeout=10) as api:

            async def ask(query: str) -> list[float]:
                reply = await api.get("/query", params={"query": query})
                if reply.status_code == 503:  # it is starting
                    return []
                answer = reply.json()
                assert answer["status"] == "success", f"{query}: {answer}"
                return [float(one["value"][1]) for one in answer["data"]["result"]]

            async def has_data(query: str) -> bool:
                written = query.replace("$__rate_interval", "60s").replace("$model", ".+")
                return any(not math.isnan(value) for value in await ask(written))

            async with asyncio.timeout(60):
                while True:
                    try:
                        if await ask("count_over_time(jaxserve_steps_total[30s]) >= 2"):
                            break
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.1)
            # the second load's rates are of series that the first one made
            for _ in range(2):
                await Load(http).run()
            empty = queries()
            for _ in range(20):  # a scrape may come late, or fail, where the machine is busy
                await asyncio.sleep(0.5)
                empty = [query for query in empty if not await has_data(query)]
                if not empty:
                    break
            assert not empty, "no data for\n" + "\n".join(empty)
    finally:
        process.terminate()
        process.wait(20)
    assert len(queries()) > 50
