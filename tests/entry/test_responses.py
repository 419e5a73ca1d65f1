"""/v1/responses by OpenAI's client unchanged, over a fake engine."""

import asyncio
import json
import logging
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest
from server_fakes import byte_tokenizer, serving, serving_http
from test_chat_tools import TEMPLATE, THINKS, TOOLS, talking
from test_http import check_error

from jaxserve.entry.responses import Store, Stored

CALL = (
    '<think>\nHm.\n</think>\n\nLook:\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Köln"}}\n</tool_call>'
)
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


CALLED: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ANSWERED: Any = {"type": "function_call_output", "call_id": "c", "output": "rain"}


def prompt_of(served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].token_ids)


async def test_text_whole_and_retrieved():
    async with talking(reply="It rains.") as (served, client):
        answer = await client.responses.create(
            model="tiny", input="Weather?", instructions="Be brief", metadata={"a": "b"},
            max_output_tokens=50, temperature=0.5,
        )  # fmt: skip
        assert (answer.status, answer.output_text) == ("completed", "It rains.")
        assert answer.metadata == {"a": "b"}
        assert answer.usage.output_tokens == 10
        assert served.engine.requests[-1].sampling.temperature == 0.5
        assert prompt_of(served) == "<system>Be brief\n<user>Weather?\n<assistant>"
        assert (await client.responses.retrieve(answer.id)) == answer
        more = await client.responses.create(
            model="tiny", input="Sure?", previous_response_id=answer.id, max_output_tokens=4
        )
        assert prompt_of(served) == (
            "<user>Weather?\n<assistant>It rains.\n<user>Sure?\n<assistant>"
        )
        assert (more.status, more.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert more.output_text == "It r"
        await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        gone = await client.responses.create(model="tiny", input="a", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)


async def test_streamed_events_make_the_answer():
    async with talking(reply=CALL, template=THINKS) as (served, client):
        whole = await client.responses.create(model="tiny", input="Weather?", tools=FLAT)
        thinking, text, call = whole.output
        assert thinking.content[0].text == "Hm."
        assert text.content[0].text == "Look:"
        assert 3 <= whole.usage.output_tokens_details.reasoning_tokens <= len("Hm.\n</think>\n\n")
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})
        stream = await client.responses.create(
            model="tiny", input="Weather?", tools=FLAT, stream=True
        )
        events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))

        def said(kind: str) -> str:
            return "".join(event.delta for event in events if event.type == f"response.{kind}")

        assert said("reasoning_text.delta") == "Hm."
        assert said("output_text.delta") == "Look:"
        assert json.loads(said("function_call_arguments.delta")) == {"city": "Köln"}
        assert kinds.count("response.output_item.added") == 3
        assert kinds.count("response.output_item.done") == 3
        final = events[-1].response
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[2].arguments == call.arguments

        answered = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        await client.responses.create(
            model="tiny", input=[answered], previous_response_id=whole.id, tools=FLAT
        )
        assert prompt_of(served).endswith(
            f'<assistant>Look:get_weather{{"city": "Köln"}}\n<tool {call.call_id}>rain\n<assistant>'
        )
        items = [{"role": "user", "content": "Weather?"}, *(o.model_dump() for o in whole.output)]
        for item in items[1:]:
            item.pop("encrypted_content", None), item.pop("namespace", None)
            for name in [name for name, value in item.items() if value is None]:
                item.pop(name)
        kept = prompt_of(served)
        await client.responses.create(model="tiny", input=[*items[:1], items[3], answered],
                                      tools=FLAT)  # fmt: skip
        assert prompt_of(served) == kept.replace("Look:", "")


async def test_the_clients_stream_helper():
    async with talking(reply="It rains.") as (_, client):
        async with client.responses.stream(model="tiny", input="Weather?") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == "It rains."


class Rain(pydantic.BaseModel):
    rains: bool


async def test_text_of_a_schema():
    async with talking(reply='{"rains": true}', template=THINKS) as (served, client):
        answer = await client.responses.parse(model="tiny", input="Weather?", text_format=Rain)
        assert answer.output_parsed == Rain(rains=True)
        assert answer.text.format.name == "Rain"
        grammar = served.engine.requests[-1].sampling.grammar
        assert (grammar.kind, grammar.field) == ("json_schema", "text.format.schema")
        assert json.loads(grammar.text)["required"] == ["rains"]
        answer = await client.responses.create(
            model="tiny", input="a", text={"format": {"type": "json_object"}, "verbosity": "medium"}
        )
        assert answer.output_text == '{"rains": true}'
        assert served.engine.requests[-1].sampling.grammar.kind == "json_object"
        await client.responses.create(model="tiny", input="a", text={"format": {"type": "text"}})
        assert served.engine.requests[-1].sampling.grammar is None


async def test_a_tool_that_must_be_called():
    arguments = '{"city": "Köln"}'
    choice: Any = {"type": "function", "name": "get_weather"}
    async with talking(reply=arguments) as (served, client):
        answer = await client.responses.create(
            model="tiny", input="Weather?", tools=FLAT, tool_choice=choice
        )
        [call] = answer.output
        assert (call.type, call.name, call.arguments) == (
            "function_call", "get_weather", arguments,
        )  # fmt: skip
        assert served.engine.requests[-1].sampling.grammar.field == "tool_choice"


@pytest.mark.parametrize(
    ("reply", "count", "status"),
    [(CALL, 82, "incomplete"), (CALL.replace('"Köln"', "Köln"), 200, "completed")],
)
async def test_a_call_that_is_no_json_is_told_as_it_is(reply, count, status):
    async with talking(reply=reply, template=THINKS) as (served, client):
        answer = await client.responses.create(
            model="tiny", input="Weather?", tools=FLAT, max_output_tokens=count
        )
        call = answer.output[-1]
        assert (answer.status, call.type) == (status, "function_call")
        assert call.arguments.startswith('{"cit')
        await client.responses.create(
            model="tiny", input="And now?", tools=FLAT, previous_response_id=answer.id
        )
        assert prompt_of(served).endswith("<user>And now?\n<assistant>")


async def test_answers_are_those_of_calls_before_them():
    async with talking(reply=CALL) as (served, client):
        whole = await client.responses.create(model="tiny", input="Weather?", tools=FLAT)
        [called] = [item for item in whole.output if item.type == "function_call"]
        for call_id, fits in ((called.call_id, True), ("other", False)):
            answer: Any = {**ANSWERED, "call_id": call_id, "id": None, "status": "completed"}
            ask = client.responses.create(
                model="tiny", input=[answer], previous_response_id=whole.id, tools=FLAT
            )
            if fits:
                await ask
                continue
            with pytest.raises(openai.BadRequestError) as caught:
                await ask
            assert caught.value.param == "input[0].call_id"
        assert len(served.engine.requests) == 2


async def test_ids_of_answers_are_those_of_the_log(caplog):
    caplog.set_level(logging.INFO, "jaxserve.access")
    bodies: Any = ({}, {"stream": True}, {"background": True})
    async with serving_http() as (served, http):
        for body in bodies:
            caplog.clear()
            answer = await http.post("/v1/responses", json={"input": "a", **body})
            found = re.search(r'"id":"(resp_[0-9a-f]+)"', answer.text)
            await served.idle()
            async with asyncio.timeout(2):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            assert found
            assert answer.headers["x-request-id"] == found[1]
            assert f"POST /v1/responses {found[1]} 200" in caplog.records[0].getMessage()
        caplog.clear()
        wrong = await http.post("/v1/responses", json={"input": "a" * 300, "background": True})
        check_error(wrong, 400, "input")
        [record] = caplog.records
        assert wrong.headers["x-request-id"] in record.getMessage()


async def test_in_the_background_and_cancelled():
    async with talking(reply="It rains.") as (served, client):
        started = await client.responses.create(model="tiny", input="a", background=True)
        assert started.status == "in_progress"
        async with asyncio.timeout(2):
            while (done := await client.responses.retrieve(started.id)).status == "in_progress":
                await asyncio.sleep(0.01)
        assert (done.status, done.output_text) == ("completed", "It rains.")
        served.engine.step_s, served.engine.ends = 0.02, False
        started = await client.responses.create(model="tiny", input="a", background=True)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input="b", previous_response_id=started.id)
        cancelled = await client.responses.cancel(started.id)
        assert cancelled.status == "cancelled"
        await served.idle()
        assert (await client.responses.retrieve(started.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel((await client.responses.create(
                model="tiny", input="a", max_output_tokens=1)).id)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "a", "call_id": "c"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
        ({"input": [{**CALLED, "content": "a"}]}, "input[0].content"),
        ({"input": [{**CALLED, "role": "assistant"}]}, "input[0].role"),
        ({"input": [CALLED, {**ANSWERED, "arguments": "{}"}]}, "input[1].arguments"),
        ({"input": [{"type": "reasoning", "content": "a", "name": "b"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "a", "status": "b"}]}, "input[0].status"),
        ({"input": [ANSWERED]}, "input[0].call_id"),
        ({"input": [ANSWERED, CALLED]}, "input[0].call_id"),
        ({"input": [CALLED, {**ANSWERED, "call_id": "d"}]}, "input[1].call_id"),
        ({"input": [{**CALLED, "arguments": '{"a": 1, "a": 2}'}]}, "input[0].arguments"),
        ({"input": "a" * 300}, "input"),
        ({"max_output_tokens": 300}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "x": 1}}}, "text.format.x"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {"text": {"format": {"type": "json_object"}}, "tool_choice": "required", "tools": FLAT},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(change, param):
    async with serving(template=TEMPLATE) as served:
        async with httpx.AsyncClient(base_url=served.url) as http:
            response = await http.post("/v1/responses", json={"input": "a", **change})
            assert check_error(response, 400)["param"].startswith(param)
            unknown = await http.post(
                "/v1/responses", json={"input": "a", "previous_response_id": "x"}
            )
            check_error(unknown, 404)
        assert served.engine.requests == []


def test_the_store_keeps_the_latest():
    store = Store(2)
    for name, status in (("a", "in_progress"), ("b", "completed"), ("c", "completed")):
        store.add(Stored({"id": name, "status": status}, []))
    assert store.get("a").body["id"] == "a"  # what runs is kept
    assert store.get("c").body["id"] == "c"
    with pytest.raises(Exception, match="no response 'b'"):
        store.get("b")


async def test_one_that_is_left_or_not_let_in_is_not_kept_as_running():
    async with talking(reply="It rains.") as (served, client):
        served.engine.step_s, served.engine.ends = 0.02, False
        stream = await client.responses.create(model="tiny", input="a", stream=True)
        created = await anext(stream)
        await stream.close()
        await served.idle()
        async with asyncio.timeout(2):
            while True:
                left = await client.responses.retrieve(created.response.id)
                if left.status != "in_progress":
                    break
                await asyncio.sleep(0.01)
        assert left.status == "cancelled"
