"""/v1/embeddings over a fake engine, by OpenAI's client: "last" is (length, 0), "mean" (3, 4)."""

import base64
import struct

import openai
import pytest
from server_fakes import serving, serving_http
from test_http import check_error


async def test_official_client():
    async with serving(embeddings=True) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            answer = await client.embeddings.create(model="tiny", input=["abc", "d"])
            assert [one.embedding for one in answer.data] == [[1.0, 0.0]] * 2
            assert [one.index for one in answer.data] == [0, 1]
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
            answer = await client.embeddings.create(
                model="tiny", input=[5, 6, 7], encoding_format="float", dimensions=2,
                extra_body={"pooling": "mean"},
            )  # fmt: skip
            assert answer.data[0].embedding == pytest.approx([0.6, 0.8])
            assert [r.pooling for r in served.engine.requests] == ["last", "last", "mean"]


async def test_forms():
    async with serving_http(embeddings=True) as (served, http):

        async def ask(**fields):
            return await http.post("/v1/embeddings", json={"input": "abcd", **fields})

        raw = (await ask(normalize=False)).json()["data"][0]["embedding"]
        assert raw == [4.0, 0.0]
        packed = (await ask(normalize=False, encoding_format="base64")).json()
        data = base64.b64decode(packed["data"][0]["embedding"])
        assert struct.unpack("<2f", data) == (4.0, 0.0)
        cut = (await ask(normalize=False, truncate_prompt_tokens=3)).json()
        assert cut["data"][0]["embedding"] == [3.0, 0.0]
        for fields, param in (
            ({"dimensions": 3}, "dimensions"),
            ({"dimensions": 0}, "dimensions"),
            ({"pooling": "max"}, "pooling"),
            ({"encoding_format": "hex"}, "encoding_format"),
            ({"input": []}, "input"),
            ({"input": ["a"] * 13}, "input"),
            ({"input": "a" * 300}, "input"),
            ({"max_tokens": 3}, "max_tokens"),
        ):
            check_error(await ask(**fields), 400, param)
        assert (await ask()).headers["x-request-id"].startswith("embd-")
        await served.idle()


async def test_without_the_engines_support_it_is_refused():
    async with serving_http() as (_, http):
        error = check_error(await http.post("/v1/embeddings", json={"input": "a"}), 400, "input")
        assert "--embeddings" in error["message"]
