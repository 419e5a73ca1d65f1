"""instructor, unchanged: answers as pydantic models, by tools and JSON schemas, without a retry."""

import asyncio
from typing import Literal

import instructor
import openai
import pydantic
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # what the clients warn of is theirs


class Day(pydantic.BaseModel, extra="forbid"):
    weather: Literal["rain", "sun"]
    degrees: int = pydantic.Field(ge=-20, le=40)


class Report(pydantic.BaseModel, extra="forbid"):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=12)
    days: list[Day] = pydantic.Field(min_length=1, max_length=3)


ASK = {
    "model": "tiny", "response_model": Report, "max_retries": 0, "max_tokens": 700,
    "messages": [{"role": "user", "content": "Weather?"}],
}  # fmt: skip
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]


@pytest.mark.parametrize("mode", MODES)
def test_models_of_answers(url, mode):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        report = instructor.from_openai(client, mode=mode).chat.completions.create(**ASK)
        assert isinstance(report, Report)
        assert 1 <= len(report.days) <= 3


def test_async_and_streamed_in_parts(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
            whole = await asking.chat.completions.create(**ASK)
            parts = [part async for part in asking.chat.completions.create_partial(**ASK)]
        return whole, parts

    whole, parts = asyncio.run(ask())
    assert isinstance(whole, Report)
    assert len(parts) > 5
    Report.model_validate(parts[-1].model_dump())
