"""The page's files and what it is told of the engine, without a browser."""

import json

import pytest
from server_fakes import serving_http

from jaxserve.entry import web_page
from jaxserve.entry.body_fields import parse
from jaxserve.entry.openai_schema import ChatRequest
from jaxserve.observation import EngineState, PrefixNode, SequenceRecord, StepRecord
from jaxserve.types import SamplingParams

CONTROLS = [
    control
    for group in json.loads((web_page.FOLDER / "controls.json").read_text())
    for control in group["controls"]
]
EXAMPLES = {
    "min_tokens": 2, "n": 2, "truncate_prompt_tokens": 5, "top_p": 0.5, "top_k": 4, "min_p": 0.1,
    "typical_p": 0.9, "seed": 3, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "no_repeat_ngram_size": 3, "bad_words": ["no"], "stop": ["a", "b"],
    "stop_regex": ["[0-9]"], "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"',
    "top_logprobs": 2, "prompt_logprobs": 2, "prompt_logprobs_start": 3, "best_of": 3,
    "length_penalty": 1.5, "stream_interval": 4, "priority": 1,
}  # fmt: skip
NEEDS = {
    "top_logprobs": {"logprobs": True},
    "prompt_logprobs": {"stream": False},
    "prompt_logprobs_start": {"stream": False, "prompt_logprobs": 2},
    "length_penalty": {"use_beam_search": True, "n": 2, "temperature": 0, "stream": False},
    "early_stopping": {"use_beam_search": True, "n": 2, "temperature": 0, "stream": False},
    "use_beam_search": {"n": 2, "temperature": 0, "stream": False},
    "best_of": {"stream": False},
    "logprobs_mode": {"logprobs": True},
}


def state(nodes: list[PrefixNode]) -> EngineState:
    return EngineState(
        now_s=5.0,
        sequences=[SequenceRecord("chatcmpl-1", "running", 1.5, 9, 8, 12, 3, 20, 2, 0)],
        steps=[StepRecord("mixed", 1.0, 1.5, None, 3, 40, 64)],
        num_prefix_pages=9,
        prefix_nodes=nodes,
    )


TREE = [
    PrefixNode(3, 0, 7, 2, [1, 2]),
    PrefixNode(4, 3, 7, 2, [3, 4]),
    PrefixNode(5, 4, 2, 0, [5, 6]),
    PrefixNode(8, 5, 2, 0, [7, 8]),
    PrefixNode(6, 4, 1, 1, [9, 9]),
    PrefixNode(7, 0, 0, 0, [0, 0]),
]


async def test_the_page_is_served_with_what_keeps_other_hosts_out():
    async with serving_http(api_key=("secret",)) as (_, http):
        page = await http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name in web_page.FILES:
            answer = await http.get(f"/web/{name}")
            assert answer.status_code == 200, "the page loads before there is a key"
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text
            assert "https://" not in text
        assert (await http.get("/web/../http.py")).status_code != 200


async def test_the_engines_state_needs_the_key_and_shows_no_text():
    async with serving_http(api_key=("secret",)) as (served, http):
        served.engine.state = state(TREE)
        assert (await http.get("/engine_state")).status_code == 401
        answer = await http.get("/engine_state", headers={"authorization": "Bearer secret"})
        found = answer.json()
        assert found["model"] == "tiny"
        assert found["sequences"][0]["num_generated"] == 3
        assert found["steps"] == [
            {
                "kind": "mixed", "begin_s": 1.0, "end_s": 1.5, "host_s": None, "num_rows": 3,
                "num_tokens": 40, "room": 64,
            }
        ]  # fmt: skip
        assert found["prefixes"]["pages"] == 9
        assert not any("text" in run for run in found["prefixes"]["runs"])
        assert set(found["stats"]) == set(web_page.STATS)


async def test_prefixes_have_their_text_where_the_log_has():
    async with serving_http(log_text=True) as (served, http):
        served.engine.state = state([PrefixNode(3, 0, 1, 0, [0, 1])])
        found = (await http.get("/engine_state")).json()
        text = (await http.post("/detokenize", json={"tokens": [0, 1]})).json()["prompt"]
        assert [run["text"] for run in found["prefixes"]["runs"]] == [text]


async def test_many_who_look_cost_the_engine_one_look():
    async with serving_http() as (served, http):
        asked = []
        send = served.engine.send
        served.engine.send = lambda message: (asked.append(message), send(message))
        for _ in range(5):
            assert (await http.get("/engine_state")).status_code == 200
        assert len(asked) == 1


async def test_without_an_engine_there_is_no_state():
    async with serving_http() as (served, http):
        served.engine.send = lambda message: served.engine.die()
        answer = await http.get("/engine_state")
        assert answer.status_code == 503


def test_pages_that_follow_one_another_are_one_run():
    found = web_page.prefixes(state(TREE), None)["runs"]
    names = ("id", "above", "pages", "tokens", "hits", "holders")
    assert [tuple(run[name] for name in names) for run in found] == [
        (3, 0, 2, 4, 7, 2), (5, 3, 2, 4, 2, 0), (6, 3, 1, 2, 1, 1), (7, 0, 1, 2, 0, 0),
    ]  # fmt: skip


def test_there_is_a_control_for_everything_that_a_chat_can_ask_for():
    names = {control["name"] for control in CONTROLS}
    elsewhere = {"grammar", "echo"}  # said in six ways below; not a chat's
    structure = {name for name in ChatRequest.model_fields if name.startswith("guided_")}
    wanted = set(SamplingParams.__struct_fields__) - elsewhere
    assert wanted | structure | {"response_format", "structured_outputs", "priority"} <= names
    assert names <= set(ChatRequest.model_fields)
    assert len(names) == len(CONTROLS)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control["name"])
def test_every_control_sends_what_the_server_takes(control):
    value = EXAMPLES.get(control["name"])
    if value is None:
        text = control.get("value") or control.get("example")
        match control["kind"]:
            case "flag":
                value = True
            case "choice":
                value = control["options"][-1]
            case "ids":
                value = [int(part) for part in text.split(",")]
            case "text":
                value = text
            case _:
                value = json.loads(text)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, control["name"]: value}
    request = parse(ChatRequest, json.dumps({**body, **NEEDS.get(control["name"], {})}).encode())
    request.sampling()
    if "min" in control:
        assert control["min"] <= value <= control.get("max", value)
