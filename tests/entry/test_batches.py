"""Files and batches by OpenAI's client unchanged."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from server_fakes import REPLY, FakeEngine, serving
from test_http import check_error

from jaxserve.entry import batches


def lines(*bodies: dict[str, Any], url: str = "/v1/completions", **changes: Any) -> bytes:
    found = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body, **changes}
        for i, body in enumerate(bodies)
    ]
    return b"\n".join(json.dumps(line).encode() for line in found) + b"\n"


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(5):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


@pytest.fixture
async def served(tmp_path):
    async with serving(files_dir=str(tmp_path / "files"), max_files_bytes=100_000) as served:
        yield served


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_batch_answers_every_line(client, served):
    many = [{"prompt": "a" * (i + 1), "max_tokens": 1 + i % 5} for i in range(40)]
    bad = [{"prompt": "a", "temperature": 9}, {"prompt": []}]
    content = lines(*many, *bad)
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
    assert (await client.files.content(file.id)).content == content
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
        metadata={"a": "b"},
    )  # fmt: skip
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (42, 40, 2)
    output = (await client.files.content(batch.output_file_id)).text.splitlines()
    answers = [json.loads(line) for line in output]
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(40)]
    for i, answer in enumerate(answers):
        body = answer["response"]["body"]
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == body["id"]
        assert body["choices"][0]["text"] == REPLY[: 1 + i % 5]
        assert body["usage"]["prompt_tokens"] == i + 1
    errors = (await client.files.content(batch.error_file_id)).text.splitlines()
    assert [json.loads(e)["response"]["body"]["error"]["param"] for e in errors] == [
        "temperature", "prompt",
    ]  # fmt: skip
    assert [b.id for b in (await client.batches.list()).data] == [batch.id]
    assert {f.purpose for f in (await client.files.list()).data} == {"batch", "batch_output"}
    await client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_chat_lines(client):
    message = {"role": "user", "content": "a"}
    content = lines({"messages": [message], "max_tokens": 5}, url="/v1/chat/completions")
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(client, batch.id)
    answer = json.loads((await client.files.content(batch.output_file_id)).text)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello"


async def test_cancelled_batches_keep_what_is_done(client, served):
    served.engine.step_s = 0.01
    content = lines({"prompt": "a", "max_tokens": 2}, *[{"prompt": "b", "max_tokens": 250}] * 3)
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    async with asyncio.timeout(3):
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.01)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelled"
    assert "r0" in (await client.files.content(batch.output_file_id)).text
    await served.idle()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"not json\n", "no request"),
        (lines({"prompt": "a"}, url="/v1/embeddings"), "url"),
        (lines({"prompt": "a"}, {"prompt": "b"}, custom_id="x"), "twice"),
        (lines({"prompt": "a", "stream": True}), "stream"),
        (lines({"prompt": "a", "background": True}), "body.background"),
        (lines({"prompt": "a"}, more=1), "more"),
    ],
)
async def test_broken_files_fail_their_batch(client, served, content, words):
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = await ended(client, batch.id)
    assert batch.status == "failed"
    assert words in batch.errors.data[0].message
    assert served.engine.requests == []


async def test_what_cannot_be_is_refused(client, served):
    async with httpx.AsyncClient(base_url=served.url) as http:
        file = await client.files.create(file=("in.jsonl", lines({"prompt": "a"})), purpose="batch")
        whole = {"input_file_id": file.id, "endpoint": "/v1/completions"}
        for body, status, param in (
            ({**whole, "completion_window": "1h"}, 400, "completion_window"),
            ({**whole, "completion_window": "24h", "endpoint": "/tokenize"}, 400, "endpoint"),
            ({**whole, "completion_window": "24h", "input_file_id": "../x"}, 404, None),
        ):
            check_error(await http.post("/v1/batches", json=body), status, param)
        for path in ("/v1/files/..%2F..%2Fetc", "/v1/files/file-x/content", "/v1/batches/x"):
            check_error(await http.get(path), 404)
        check_error(await http.get("/v1/files?limit=0"), 400, "limit")
        upload = {"file": ("a", b"x")}
        check_error(await http.post("/v1/files", files=upload), 400, "purpose")
        data = {"purpose": "fine-tune"}
        check_error(await http.post("/v1/files", files=upload, data=data), 400, "purpose")
        check_error(await http.post("/v1/files", data={"purpose": "batch"}), 415)
        big = {"file": ("a", b"x" * 90_000)}
        for status in (200, 413):
            response = await http.post("/v1/files", files=big, data={"purpose": "batch"})
            assert response.status_code == status


async def test_without_a_folder_there_are_none_and_it_is_said_why():
    async with serving() as served, httpx.AsyncClient(base_url=served.url) as http:
        for method, path in (
            ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/a/content"),
            ("DELETE", "/v1/files/a"), ("POST", "/v1/batches"), ("POST", "/v1/batches/a/cancel"),
        ):  # fmt: skip
            error = check_error(await http.request(method, path), 404)
            assert error["code"] == "files_off"
            assert "--files-dir" in error["message"]


async def test_a_fault_inside_fails_the_batch_and_is_logged(client, monkeypatch, caplog):
    async def broken(self, batch):
        raise RuntimeError("out of order")

    monkeypatch.setattr(batches.Runner, "_run", broken)
    file = await client.files.create(file=("in.jsonl", lines({"prompt": "a"})), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = await ended(client, batch.id)
    assert batch.status == "failed"
    assert batch.errors.data[0].message == "internal error"
    [record] = [r for r in caplog.records if r.name == "jaxserve.batches"]
    assert batch.id in record.message
    assert "out of order" in str(record.exc_info[1])


async def test_batches_outlive_the_server_and_those_that_ran_have_failed(tmp_path):
    folder = tmp_path / "files"
    two = lines({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 250})

    async def begin(client: openai.AsyncOpenAI, content: bytes) -> Any:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        return await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

    @contextlib.asynccontextmanager
    async def running(**options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with serving(files_dir=str(folder), max_files_bytes=100_000, **options) as served:
            url = f"{served.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield client

    def slow(engine: FakeEngine) -> None:
        engine.step_s = 0.02

    async with running(set_up=slow, grace_s=0.0) as client:
        done = await ended(client, (await begin(client, two.splitlines()[0])).id)
        left = await begin(client, two)
        async with asyncio.timeout(3):
            while (await client.batches.retrieve(left.id)).request_counts.completed < 1:
                await asyncio.sleep(0.01)
    async with running() as client:
        assert {b.id for b in (await client.batches.list()).data} == {left.id, done.id}
        assert await client.batches.retrieve(done.id) == done
        assert "r0" in (await client.files.content(done.output_file_id)).text
        left = await client.batches.retrieve(left.id)
        assert left.status == "failed"
        assert left.errors.data[0].message == batches.SERVER_ENDED
        counts = left.request_counts
        assert (counts.total, counts.completed, counts.failed) == (2, 1, 0)
        assert "r0" in (await client.files.content(left.output_file_id)).text
        # One whose server was killed says nothing of its answers.
        path = folder / f"{done.id}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "status": "in_progress"}))
    async with running() as client:
        assert (await client.batches.retrieve(done.id)).status == "failed"


async def test_lines_wait_while_the_engine_starts_anew(tmp_path):
    async with serving(
        files_dir=str(tmp_path), restart_engine=True, set_up=lambda e: setattr(e, "step_s", 0.01)
    ) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            content = lines(*[{"prompt": "a", "max_tokens": 30}] * 4)
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            async with asyncio.timeout(3):
                while not served.engine.running:
                    await asyncio.sleep(0.01)
            served.engine.die()
            batch = await ended(client, batch.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 4)
            assert len(served.engines) == 2


async def test_a_file_half_written_is_no_file(client, tmp_path):
    (tmp_path / "files" / f"file-{'0' * 32}").write_bytes(b"half")
    assert (await client.files.list()).data == []
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(f"file-{'0' * 32}")
