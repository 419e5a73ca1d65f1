"""litellm, unchanged: whole, streamed, async, tools, schemas, errors, embeddings."""

import asyncio
import json

import litellm
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # what the clients warn of is theirs

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def options(url):
    return {
        "model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0,
        "max_retries": 0,
    }  # fmt: skip


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0}


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_whole_and_streamed_say_the_same(options, provider):
    options["model"] = f"{provider}/tiny"
    whole = litellm.completion(**options, **CHAT, seed=1, stop=["never"], user="u")
    assert whole.usage.completion_tokens == 20
    text = whole.choices[0].message.content
    pieces = list(litellm.completion(**options, **CHAT, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert len(pieces) > 5
    again = asyncio.run(litellm.acompletion(**options, **CHAT))
    assert again.choices[0].message.content == text


def test_tools_and_schemas(options):
    chat = {**CHAT, "max_tokens": 100, "temperature": 1}
    answer = litellm.completion(**options, **chat, tools=[TOOL], tool_choice="required")
    [call, *_] = answer.choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)  # litellm drops additionalProperties
    schema = {"name": "city", "schema": TOOL["function"]["parameters"], "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = litellm.completion(**options, **chat, response_format=form)
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}


def test_completions_embeddings_and_errors(options):
    text = {**options, "model": "text-completion-openai/tiny"}
    answer = litellm.text_completion(**text, prompt="Once", max_tokens=5, logprobs=2)
    assert answer.usage.completion_tokens == 5
    found = litellm.embedding(**{**options, "model": "openai/tiny"}, input=["a", "bc"])
    assert len(found.data) == 2
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, **{**CHAT, "temperature": 3})
