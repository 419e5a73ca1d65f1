"""Tools and thinking in chats, by OpenAI's client unchanged."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from server_fakes import FakeEngine, Served, byte_tokenizer, serving
from test_http import check_error

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{# <tool_call> #}{% if enable_thinking is defined %}think={{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = TEMPLATE + "{# <think></think> #}"
REPLY = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
USER: Any = {"role": "user", "content": "Weather?"}


class GetWeather(pydantic.BaseModel):
    city: str
    days: int
    unit: Literal["C", "F"] = "C"


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
CHAT: Any = {"model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": 400}


def ends(engine: FakeEngine) -> None:
    engine.ends = True


@contextlib.asynccontextmanager
async def talking(
    reply: str = REPLY, template: str = TEMPLATE, **settings: Any
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    info = {"max_model_len": 1024, "max_request_tokens": 1024}
    async with serving(
        reply=reply, template=template, set_up=ends, info=info, **settings
    ) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield served, client


async def test_parallel_calls_whole():
    async with talking() as (served, client):
        answer = await client.chat.completions.create(**CHAT)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        first, second = choice.message.tool_calls
        assert (first.type, first.function.name) == ("function", "get_weather")
        assert json.loads(first.function.arguments) == {"city": "Köln", "days": 2}
        assert (second.function.name, second.function.arguments) == ("get_time", "{}")
        assert first.id.startswith("call_")
        assert first.id != second.id
        prompt = bytes(list(served.engine.requests[-1].token_ids))
        text = byte_tokenizer().decode(list(prompt))
        assert text == "[get_weather][get_time]<user>Weather?\n<assistant>"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_with_its_first(stream):
    first = REPLY[: REPLY.index("}}") + 1]  # the end of its arguments
    async with talking() as (served, client):
        chat: Any = {**CHAT, "parallel_tool_calls": False, "n": 2}
        if stream:
            async with client.chat.completions.stream(**chat) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**chat)
            assert answer.usage.completion_tokens == 2 * len(first.encode())
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Köln", "days": 2}
        await served.idle()
        assert len(served.engine.aborted) == 2
        answer = await client.chat.completions.create(**chat, tool_choice="required")
        schema = json.loads(served.engine.requests[-1].sampling.grammar.text)
        assert (schema["minItems"], schema["maxItems"]) == (1, 1)
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        answer = await client.responses.create(
            model="tiny", input="Weather?", tools=tools, parallel_tool_calls=False
        )
        assert [item.type for item in answer.output] == ["message", "function_call"]
        assert answer.usage.output_tokens == len(first.encode())


async def test_streamed_deltas_make_the_same():
    async with talking() as (_, client):
        stream = await client.chat.completions.create(**CHAT, stream=True, n=2)
        texts, calls, reasons = ["", ""], [{}, {}], [None, None]
        num_pieces = 0
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    calls[choice.index][call.index] = [call.function.name, ""]
                calls[choice.index][call.index][1] += call.function.arguments
                num_pieces += 1
        assert texts == ["Let me look."] * 2
        assert reasons == ["tool_calls"] * 2
        for found in calls:
            assert [name for name, _ in found.values()] == ["get_weather", "get_time"]
            assert json.loads(found[0][1]) == {"city": "Köln", "days": 2}
        assert num_pieces > 20  # as they come


@pytest.mark.parametrize(
    ("change", "reason", "calls"),
    [
        ({"stop": ['"days"']}, "stop", ["get_weather"]),
        ({"stop": ["get_time"]}, "stop", ["get_weather"]),
        ({"stop": ['{"name": "get_time']}, "stop", ["get_weather"]),
        ({"stop": ["</tool_call>"]}, "tool_calls", ["get_weather"]),
        ({"stop": ["}\n</tool_call>"]}, "tool_calls", ["get_weather"]),
        ({"max_tokens": 80}, "length", ["get_weather"]),
        ({"max_tokens": 117}, "length", ["get_weather"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cuts_a_call_off_is_told(change, reason, calls, stream):
    async with talking() as (served, client):
        chat = {**CHAT, **change}
        if stream:
            async with client.chat.completions.stream(**chat) as events:
                try:
                    answer = await events.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    answer = error.completion
        else:
            answer = await client.chat.completions.create(**chat)
        [choice] = answer.choices
        assert choice.finish_reason == reason
        assert [call.function.name for call in choice.message.tool_calls] == calls
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        if "stop" in change:  # a call that a grammar has brought about
            served.engine.reply_ids = byte_tokenizer().encode('{"days": 1}', False)
            answer = await client.chat.completions.create(
                **CHAT, tool_choice=named, stop=['"days"', "}"][reason == "tool_calls"]
            )
            assert answer.choices[0].finish_reason == "stop"


async def test_a_call_cut_off_is_an_incomplete_item():
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with talking() as (served, _), httpx.AsyncClient(base_url=served.url) as http:

        async def items(**fields: Any) -> list[tuple[str, str]]:
            body = {"input": "Weather?", "tools": tools, **fields}
            answer = (await http.post("/v1/responses", json=body)).json()
            return [(item["type"], item["status"]) for item in answer["output"]]

        message, call = ("message", "completed"), ("function_call", "completed")
        cut = ("function_call", "incomplete")
        assert await items(stop='"days"') == [message, cut]
        assert await items(stop="</tool_call>") == [message, call]
        assert await items(stop='"arguments": {}') == [message, call, cut]
        assert await items() == [message, call, call]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_the_best_of_some_answers_have_one_call_too(choice):
    reply, whole = (REPLY, REPLY[: REPLY.index("}}") + 1]) if choice == "auto" else (LIST, LIST)
    async with talking(reply=reply) as (served, client):
        chat: Any = {**CHAT, "parallel_tool_calls": False, "tool_choice": choice, "n": 2}
        answer = await client.chat.completions.create(**chat, extra_body={"best_of": 3})
        for one in answer.choices:
            assert one.finish_reason == "tool_calls"
            assert len(one.message.tool_calls) == 1
        assert answer.usage.completion_tokens == 3 * len(whole.encode()) + 3 * (choice != "auto")
        await served.idle()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **{**chat, "max_tokens": 5}, temperature=0, extra_body={"use_beam_search": True}
            )
        field = "parallel_tool_calls" if choice == "auto" else "tool_choice"
        assert caught.value.param == field
        assert "use_beam_search" in caught.value.message


async def test_the_clients_own_helpers():
    async with talking() as (served, client):
        tools = [openai.pydantic_function_tool(GetWeather, name="get_weather"), TOOLS[1]]
        tools[1] = openai.pydantic_function_tool(pydantic.create_model("GetTime"), name="get_time")
        parsed = await client.chat.completions.parse(**{**CHAT, "tools": tools})
        (first, second) = parsed.choices[0].message.tool_calls
        assert first.function.parsed_arguments == GetWeather(city="Köln", days=2)
        assert second.function.name == "get_time"
        async with client.chat.completions.stream(**{**CHAT, "tools": tools}) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.choices[0].message.tool_calls[0].function.parsed_arguments.city == "Köln"

        def ask() -> Any:
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as sync:
                return sync.chat.completions.create(**CHAT)

        answer = await asyncio.to_thread(ask)
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


async def test_a_conversation_goes_on_with_the_tools_answer():
    async with talking(reply="It rains.") as (served, client):
        call = {
            "id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
        }  # fmt: skip
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
        answer = await client.chat.completions.create(**{**CHAT, "messages": messages})
        assert answer.choices[0].message.content == "It rains."
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        text = byte_tokenizer().decode(served.engine.requests[-1].token_ids)
        assert text == (
            "[get_weather][get_time]<user>Weather?\n<assistant>"
            'get_weather{"city": "Köln"}\n<tool call_1>rain\n<assistant>'
        )


async def test_without_tools_or_with_none_of_them_calls_are_text():
    async with talking() as (served, client):
        for change in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
            answer = await client.chat.completions.create(**{**CHAT, **change})
            assert answer.choices[0].message.content == REPLY
            assert answer.choices[0].message.tool_calls is None
            text = byte_tokenizer().decode(served.engine.requests[-1].token_ids)
            assert text == "<user>Weather?\n<assistant>"


LIST = (
    '[{"name": "get_weather", "arguments": {"city": "Köln"}}, '
    '{"name": "get_time", "arguments": {}}]'
)


@pytest.mark.parametrize("template", [TEMPLATE, THINKS])
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_are_required_are_what_a_grammar_says(template, stream):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reply, calls in (
        ("required", LIST, [("get_weather", {"city": "Köln"}), ("get_time", {})]),
        (named, '{"city": "Köln"}', [("get_weather", {"city": "Köln"})]),
    ):
        async with talking(reply=reply, template=template) as (served, client):
            if stream:
                async with client.chat.completions.stream(**CHAT, tool_choice=choice) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**CHAT, tool_choice=choice)
            [told] = answer.choices
            found = [(c.function.name, json.loads(c.function.arguments))
                     for c in told.message.tool_calls]  # fmt: skip
            assert found == calls
            assert not told.message.content
            assert told.finish_reason == "tool_calls"
            grammar = served.engine.requests[-1].sampling.grammar
            assert (grammar.kind, grammar.field) == ("json_schema", "tool_choice")
            schema = json.loads(grammar.text)
            if choice == "required":
                names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
                assert names == ["get_weather", "get_time"]
            else:
                assert schema == TOOLS[0]["function"]["parameters"]


async def test_what_a_grammar_says_is_no_thinking():
    async with talking(reply='{"rain": true}', template=THINKS, reasoning_parser="deepseek_r1") as (
        _,
        client,
    ):
        answer = await client.chat.completions.create(
            model="tiny", messages=[USER], response_format={"type": "json_object"}
        )
        message = answer.choices[0].message
        assert message.content == '{"rain": true}'
        assert "reasoning_content" not in message.model_extra


async def test_thinking_is_apart_from_the_answer():
    reply = "<think>\nIt may rain.\n</think>\n\nRain."
    async with talking(reply=reply, template=THINKS) as (_, client):
        chat = {"model": "tiny", "messages": [USER], "max_tokens": 200}
        message = (await client.chat.completions.create(**chat)).choices[0].message
        assert message.content == "Rain."
        assert message.model_extra["reasoning_content"] == "It may rain."
        thoughts = text = ""
        async for chunk in await client.chat.completions.create(**chat, stream=True):
            delta = chunk.choices[0].delta
            thoughts += (delta.model_extra or {}).get("reasoning_content") or ""
            text += delta.content or ""
        assert (thoughts, text) == ("It may rain.", "Rain.")
        for field, content in (("separate_reasoning", reply), ("include_reasoning", "Rain.")):
            answer = await client.chat.completions.create(**chat, extra_body={field: False})
            message = answer.choices[0].message
            assert message.content == content
            assert "reasoning_content" not in message.model_extra


async def test_variables_reach_the_template():
    async with talking(reply="Ok") as (served, client):
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        await client.chat.completions.create(model="tiny", messages=[USER], extra_body=extra)
        text = byte_tokenizer().decode(served.engine.requests[-1].token_ids)
        assert text == "<user>Weather?\nthink=False<assistant>"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}},
          "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
         "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(change, param):
    async with talking() as (served, _), httpx.AsyncClient(base_url=served.url) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, **change})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(param)
        assert served.engine.requests == []


CALL = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
HISTORY: Any = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]
PLAIN = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
TEMPLATES = [
    # (template, what of the history it has no place for)
    (PLAIN, "messages[1].tool_calls"),
    (PLAIN + "{{ tools }}", "messages[1].tool_calls"),
    (PLAIN + "{{ messages[1].tool_calls }}", None),
]


@pytest.mark.parametrize(("template", "param"), TEMPLATES)
async def test_a_history_of_calls_needs_a_place_in_the_template(template, param):
    async with talking(template=template) as (served, _), httpx.AsyncClient() as http:

        async def check(path: str, body: Any, param: str | None) -> None:
            answer = await http.post(f"{served.url}/v1/{path}", json=body)
            if param is None:
                assert answer.status_code == 200
            else:
                assert check_error(answer, 400, param)["code"] == "unsupported_parameter"

        await check("chat/completions", {"messages": HISTORY, "max_tokens": 5}, param)
        items: list[Any] = [
            USER,
            {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ]
        body = {"input": items, "max_output_tokens": 5}
        await check("responses", body, param and "input[1].type")
        assert len(served.engine.requests) == (0 if param else 2)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_call_id": "d"}, "messages[2].tool_call_id"),
        ({"tool_call_id": "c"}, None),
        ({"role": "user", "tool_call_id": None}, None),
    ],
)
@pytest.mark.parametrize("has_ids", [True, False])
async def test_answers_are_those_of_calls_before_them(change, param, has_ids):
    history = json.loads(json.dumps(HISTORY))
    history[2] |= change
    if not has_ids:
        del history[1]["tool_calls"][0]["id"]
        param = None  # any may be the call's
    async with talking() as (served, _), httpx.AsyncClient(base_url=served.url) as http:
        answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": history})
        if param is None:
            assert answer.status_code == 200
        else:
            check_error(answer, 400, param)
        history[1:] = history[:0:-1]  # before their call, answers answer nothing
        answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": history})
        assert answer.status_code == (400 if "role" not in change else 200)


async def test_tools_need_a_format_and_a_place_in_the_template():
    for settings in ({"template": "{{ messages }}<tool_call>"}, {"tool_call_parser": "none"}):
        async with talking(**settings) as (served, _), httpx.AsyncClient() as http:
            response = await http.post(f"{served.url}/v1/chat/completions", json=CHAT)
            check_error(response, 400, "tools")
