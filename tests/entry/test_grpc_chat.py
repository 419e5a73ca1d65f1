"""Tools and thinking in gRPC chats: the same prompts and answers as over HTTP."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from server_fakes import Served, byte_tokenizer, finish, serving_grpc
from test_chat_tools import CHAT, REPLY, TEMPLATE, TEMPLATES, THINKS, TOOLS, ends

from jaxserve.entry.proto import jaxserve_pb2 as pb

PB_TOOLS = [
    pb.Tool(
        name="get_weather",
        description="Weather of a city.",
        parameters=json.dumps(TOOLS[0]["function"]["parameters"]),
    ),
    pb.Tool(name="get_time"),
]
USER = pb.Message(role="user", content="Weather?")
LONG = pb.SamplingParams(max_tokens=400)


@contextlib.asynccontextmanager
async def talking(
    reply: str = REPLY, template: str = TEMPLATE, **settings: Any
) -> AsyncIterator[tuple[Served, Any]]:
    info = {"max_model_len": 1024, "max_request_tokens": 1024}
    async with serving_grpc(
        reply=reply, template=template, set_up=ends, info=info, **settings
    ) as pair:
        yield pair


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**{"messages": [USER], "tools": PB_TOOLS, "sampling": LONG, **fields})


def prompt_of(served: Served) -> str:
    return byte_tokenizer().decode(served.engine.requests[-1].token_ids)


class Answer:
    """A choice of a chat, put together from its responses."""

    def __init__(self, responses: list[pb.GenerateResponse], index: int = 0):
        own = [r for r in responses if r.index == index]
        self.text = "".join(r.text for r in own)
        self.reasoning = "".join(r.reasoning_content for r in own)
        self.finish_reason = own[-1].finish_reason
        self.calls: dict[int, list[str]] = {}
        for delta in (call for r in own for call in r.tool_calls):
            if delta.HasField("name"):
                assert delta.id
                self.calls[delta.index] = [delta.name, ""]
            self.calls[delta.index][1] += delta.arguments


async def ask(stub: Any, request: pb.ChatRequest) -> list[pb.GenerateResponse]:
    return [r async for r in stub.Chat(request)]


async def test_calls_are_streamed_for_each_choice():
    async with talking() as (served, stub):
        sampling = pb.SamplingParams(max_tokens=400, n=2)
        responses = await ask(stub, chat(sampling=sampling))
        for index in range(2):
            answer = Answer(responses, index)
            assert answer.text == "Let me look."
            assert answer.finish_reason == pb.FINISH_REASON_TOOL_CALLS
            (name, arguments), (second, empty) = answer.calls.values()
            assert (name, second, empty) == ("get_weather", "get_time", "{}")
            assert json.loads(arguments) == {"city": "Köln", "days": 2}
        assert sum(len(r.tool_calls) > 0 for r in responses) > 20  # as they come
        assert prompt_of(served) == "[get_weather][get_time]<user>Weather?\n<assistant>"
        one = Answer(await ask(stub, chat(parallel_tool_calls=False)))
        assert [name for name, _ in one.calls.values()] == ["get_weather"]


async def test_the_engine_is_asked_the_same_as_by_http():
    history = [
        pb.Message(role="system", content="s"),
        USER,
        pb.Message(
            role="assistant",
            tool_calls=[pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Köln"}')],
        ),
        pb.Message(role="tool", tool_call_id="c1", content="rain"),
    ]
    http_history: Any = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"messages": history}, {"messages": http_history}),
        ({"tool_choice": pb.ToolChoice(mode="none")}, {"tool_choice": "none"}),
        ({"tool_choice": pb.ToolChoice(mode="required")}, {"tool_choice": "required"}),
        ({"tool_choice": pb.ToolChoice(function="get_weather")}, {"tool_choice": named}),
        (
            {"chat_template_kwargs": '{"enable_thinking": false}'},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
    ]
    async with talking() as (served, stub), httpx.AsyncClient(base_url=served.url) as http:
        for ours, theirs in changes:
            await ask(stub, chat(**ours))
            response = await http.post("/v1/chat/completions", json={**CHAT, **theirs})
            assert response.status_code == 200
            mine, other = served.engine.requests[-2:]
            assert mine.token_ids == other.token_ids
            assert mine.sampling.grammar == other.sampling.grammar
    assert "think=False" in prompt_of(served)


async def test_a_call_that_is_required_is_what_a_grammar_says():
    async with talking(reply='{"city": "Köln"}') as (_, stub):
        responses = await ask(stub, chat(tool_choice=pb.ToolChoice(function="get_weather")))
        answer = Answer(responses)
        assert answer.calls == {0: ["get_weather", '{"city": "Köln"}']}
        assert (answer.text, answer.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)


async def test_thinking_is_apart_from_the_answer():
    reply = "<think>\nIt may rain.\n</think>\n\nRain."
    async with talking(reply=reply, template=THINKS) as (_, stub):
        answer = Answer(await ask(stub, chat(tools=[])))
        assert (answer.reasoning, answer.text) == ("It may rain.", "Rain.")
        assert answer.finish_reason == pb.FINISH_REASON_STOP
        whole = Answer(await ask(stub, chat(tools=[], separate_reasoning=False)))
        assert (whole.reasoning, whole.text) == ("", reply)
        hidden = Answer(await ask(stub, chat(tools=[], include_reasoning=False)))
        assert (hidden.reasoning, hidden.text) == ("", "Rain.")


@pytest.mark.parametrize(("template", "param"), TEMPLATES)
async def test_a_history_of_calls_needs_a_place_in_the_template(template, param):
    history = [
        USER,
        pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="c", name="f", arguments="{}")]),
        pb.Message(role="tool", tool_call_id="c", content="noon"),
    ]
    async with talking(template=template) as (_, stub):
        call = stub.Chat(chat(messages=history, tools=[]))
        if param is None:
            await finish(call)
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(param)


async def test_what_cuts_a_call_off_is_told():
    async with talking() as (_, stub):
        for stop, reason in (
            ('"days"', pb.FINISH_REASON_STOP),
            ("</tool_call>", pb.FINISH_REASON_TOOL_CALLS),
        ):
            sampling = pb.SamplingParams(max_tokens=400, stop=[stop])
            answer = Answer(await ask(stub, chat(sampling=sampling)))
            assert [name for name, _ in answer.calls.values()] == ["get_weather"]
            assert answer.finish_reason == reason


def robot(**fields: Any) -> dict[str, Any]:
    return {"messages": [pb.Message(**fields)]}


TWICE = '{"a": {"type": "string"}, "b": {"c": 1, "c": 2}}'


def with_call(**fields: str) -> dict[str, Any]:
    return robot(role="assistant", tool_calls=[pb.ToolCall(**fields)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages"),
        (robot(role="robot", content="a"), "messages[0].role"),
        (robot(role="user"), "messages[0].content"),
        (robot(role="tool", content="x"), "messages[0].tool_call_id"),
        (robot(role="user", content="x", reasoning_content="y"), "messages[0].reasoning_content"),
        (robot(role="tool", content="x", tool_call_id="c"), "messages[0].tool_call_id"),
        (with_call(name="f", arguments="{"), "messages[0].tool_calls[0].arguments"),
        (with_call(name="f", arguments=TWICE), "messages[0].tool_calls[0].arguments"),
        ({"tools": [pb.Tool(name="f", parameters=TWICE)]}, "tools[0].parameters"),
        ({"chat_template_kwargs": TWICE}, "chat_template_kwargs"),
        ({"sampling": pb.SamplingParams(json_schema=TWICE)}, "json_schema"),
        ({"sampling": pb.SamplingParams(structural_tag=TWICE)}, "structural_tag"),
        ({"messages": [pb.Message(role="user", content="a" * 2000)]}, "messages: has 20"),
        ({"tools": [PB_TOOLS[1], PB_TOOLS[1]]}, "tools"),
        ({"tools": [pb.Tool(name="no spaces")]}, "tools[0].name"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="f", parameters="[]")]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="f", parameters='{"a": NaN}')]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="f", parameters='{"a": "\\ud800"}')]}, "tools[0].parameters"),
        ({"chat_template_kwargs": '{"a": "\\ud800"}'}, "chat_template_kwargs"),
        (with_call(name="f", arguments='{"a": "\\ud800"}'), "messages"),
        ({"tool_choice": pb.ToolChoice()}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode="sometimes")}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(function="other")}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode="required"), "tools": []}, "tool_choice"),
        (
            {
                "tool_choice": pb.ToolChoice(mode="required"),
                "sampling": pb.SamplingParams(json_object=True),
            },
            "tool_choice",
        ),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": '{"tools": []}'}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "[" * 100_000}, "chat_template_kwargs"),
        ({"cache_salt": "\n"}, "cache_salt"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], words: str):
    async with talking() as (served, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(stub.Chat(chat(**change)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(words)
        assert served.engine.requests == []
