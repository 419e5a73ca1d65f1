"""LangChain's client of OpenAI servers, unchanged."""

import asyncio
import contextlib
import warnings

import httpx
import pydantic
import pytest
from test_chat_tools import talking

pytestmark = pytest.mark.slow  # its import alone takes seconds


@pytest.fixture(scope="module")
def langchain():
    with warnings.catch_warnings():
        # What its modules warn of as they load is theirs.
        warnings.filterwarnings("ignore", module=r"(langchain|langsmith|pydantic)")
        import langchain_openai
    return langchain_openai


@contextlib.asynccontextmanager
async def connected(**settings):
    """A server, and what a client of it is made with; its own connections would never close."""
    async with talking(**settings) as (served, _), httpx.AsyncClient() as http:
        with httpx.Client() as sync:
            yield {
                "model": "tiny", "base_url": f"{served.url}/v1", "api_key": "none",
                "http_async_client": http, "http_client": sync,
            }  # fmt: skip


class get_weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str
    days: int


async def test_tools_whole_and_streamed(langchain):
    async with connected() as options:
        model = langchain.ChatOpenAI(**options, max_tokens=400, stream_usage=True)
        model = model.bind_tools([get_weather])
        answer = await model.ainvoke("Weather?")
        assert answer.content == "Let me look."
        assert answer.tool_calls[0]["name"] == "get_weather"
        assert answer.tool_calls[0]["args"] == {"city": "Köln", "days": 2}
        whole = None
        async for chunk in model.astream("Weather?"):
            whole = chunk if whole is None else whole + chunk
        assert whole.content == "Let me look."
        assert whole.tool_calls[0]["args"] == {"city": "Köln", "days": 2}
        assert whole.usage_metadata["output_tokens"] > 0


async def test_text_from_a_thread_and_embeddings(langchain):
    async with connected(reply="It rains.", embeddings=True) as options:
        model = langchain.ChatOpenAI(**options, max_tokens=50)
        answer = await asyncio.to_thread(model.invoke, "Weather?")
        assert answer.content == "It rains."
        vectors = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        assert await vectors.aembed_documents(["abc", "d"]) == [[1.0, 0.0]] * 2
