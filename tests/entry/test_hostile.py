"""What nobody means to send: each is refused with a reason, at once, and the server goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from server_fakes import serving_http
from test_chat_tools import THINKS
from test_http import check_error

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
TWICE = '{"type": "object", "type": "string"}'
DEEP = "[" * 100_000 + "]" * 100_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("files")
    async with serving_http(template=THINKS, files_dir=str(folder), embeddings=True) as (_, http):
        yield http
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", '{"prompt": "a", "prompt": "b"}', "prompt"),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", '
         '"content": "b"}]}', "content"),
        ("/v1/completions", {"prompt": "a", "guided_json": TWICE}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": TWICE}},
         "structured_outputs.structural_tag"),
        ("/v1/chat/completions", calling(TWICE), "messages[1].tool_calls[0].function.arguments"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": TWICE}},
         "sampling_params.json_schema"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f",
                                      "arguments": TWICE}]}, "input[0].arguments"),
        *[
            ("/v1/completions", {"prompt": "a", "logit_bias": {key: 1}}, "logit_bias")
            for key in ("05", "+5", " 5", "5_0", "5.0", "-1", "٣", "9" * 30, "9" * 5000, "")
        ],
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1e300}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "n": 10**30}, "n"),
        ("/v1/completions", {"prompt": "a", "n": -1}, "n"),
        ("/v1/completions", {"prompt": "a", "best_of": 10**30}, "best_of"),
        ("/v1/completions", {"prompt": "a", "seed": -(10**30)}, "seed"),
        ("/v1/completions", {"prompt": "a", "top_k": 10**30}, "top_k"),
        ("/v1/completions", {"prompt": "a", "temperature": 10**400}, "temperature"),
        ("/v1/completions", {"prompt": "a", "no_repeat_ngram_size": 10**30}, None),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 10**30},
         "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a", "priority": 10**30}, "priority"),
        ("/v1/completions", {"prompt": "a", "guided_json": DEEP}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "guided_json": '{"const": NaN}'}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "guided_json": '{"const": 1e999}'}, "guided_json"),
        ("/v1/completions", '{"prompt": "a", "guided_json": {"const": ' + "9" * 5000 + "}}",
         None),
        ("/v1/completions", {"prompt": "a", "guided_choice": []}, "guided_choice"),
        ("/v1/chat/completions", calling(DEEP), "messages[1].tool_calls[0].function.arguments"),
        ("/v1/chat/completions", calling('{"a": "\\ud800"}'), "messages"),
        ("/v1/chat/completions", calling("9" * 5000), "messages"),
        *[
            ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {name: 1}},
             "chat_template_kwargs")
            for name in ("self", "messages", "add_generation_prompt", "tools")
        ],
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs":
                                  {"conversation": 1, "template": 2, "": 3}}, None),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f",
                                      "arguments": DEEP}]}, "input[0]"),
        ("/v1/responses", {"input": "a", "previous_response_id": "\x00" * 5000}, None),
        ("/generate", {"input_ids": [[]]}, None),
        ("/generate", {"input_ids": [258]}, None),
        ("/generate", {"input_ids": "abc"}, "input_ids"),
        ("/generate", {"text": []}, None),
        ("/generate", {"text": "a", "rid": "é"}, "rid"),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 10**30},
         "logprob_start_len"),
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [10**30]},
         "label_token_ids"),
        ("/v1/score", {"query": [1], "items": [[10**30]], "label_token_ids": [1]}, "items[0]"),
        ("/v1/embeddings", {"input": ""}, None),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**30}, "dimensions"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/tokenize", '{"prompt": "\\ud800"}', None),
        ("/v1/batches", {"input_file_id": "../../etc", "endpoint": "/v1/completions",
                         "completion_window": "24h"}, None),
        ("/abort_request", {"rid": ""}, "rid"),
    ],
)  # fmt: skip
async def test_bodies(http: httpx.AsyncClient, path: str, body: Any, param: str | None):
    content = body if isinstance(body, str) else json.dumps(body)
    async with asyncio.timeout(5):
        answer = await http.post(path, content=content.encode(), headers=JSON)
    if param is None:
        assert answer.status_code in (200, 400, 404), answer.text
    else:
        told = check_error(answer, 400)
        assert (told["param"] or "").startswith(param), told
    assert len(answer.content) < 2000 or answer.status_code == 200


async def test_limits_and_ids_in_queries(http: httpx.AsyncClient):
    for query in ("limit=²", "limit=-1", "limit=1e3", "limit=" + "9" * 5000, "limit=", "x=1"):
        check_error(await http.get(f"/v1/files?{query}"), 400)
        check_error(await http.get(f"/v1/batches?{query}"), 400)
    for name in ("%00", "%ff", "..%2f..", "a" * 5000, "%ed%a0%80"):
        for path in ("/v1/files", "/v1/batches", "/v1/responses", "/v1/models"):
            assert (await http.get(f"{path}/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("multipart/form-data", b"abc"),
        ("multipart/form-data; boundary=", b"abc"),
        ("multipart/form-data; boundary=x", b"--x"),
        ("multipart/form-data; boundary=x", b"--x\r\nno header\r\n\r\n\r\n--x--\r\n"),
        ("multipart/form-data; boundary=\xe9", b"--\xe9--"),
        ("multipart/form-data; boundary=x; charset=nonsense",
         b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'),
        ("multipart/form-data; boundary=x",
         b'--x\r\ncontent-disposition: form-data; name="\xff"\r\n\r\n\xff\r\n--x--\r\n'),
        ("multipart/form-data; boundary=x",
         b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n' * 50 + b"--x--\r\n"),
        ("multipart/form-data; boundary=x",
         b'--x\r\ncontent-disposition: form-data\r\n\r\n1\r\n--x--\r\n'),
    ],
)  # fmt: skip
async def test_forms(http: httpx.AsyncClient, kind: str, content: bytes):
    headers = {"content-type": kind.encode("latin-1")}
    check_error(await http.post("/v1/files", content=content, headers=headers), 400)


@pytest.mark.parametrize(
    "line",
    [
        rb'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
        rb'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"a": "\ud800"}}',
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": '
        + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"n": 1e999}}',
        b"\xff\xfe",
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": '
        b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}}',
    ],
    ids=range(6),
)  # fmt: skip
async def test_lines_of_batches(http: httpx.AsyncClient, line: bytes):
    form = {"files": {"file": ("a\x00\ud7ff.jsonl", line)}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=body)).json()
    async with asyncio.timeout(5):
        while batch["status"] not in ("failed", "completed"):
            await asyncio.sleep(0.01)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    if batch["status"] == "failed":
        assert batch["errors"]["data"][0]["code"] == "invalid_line"
    else:
        text = (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text
        assert json.loads(text)["response"]["status_code"] == 400


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", b"\xff\xfe")],
        [("x-request-id", b"\xff")],
        [("content-type", b"application/json; charset=\xff")],
        [("x" * 100, b"a")] * 200,
        [("accept", b"\x80" * 1000)],
        [("content-length", b"-5")],
        [("expect", b"nonsense")],
    ],
    ids=range(7),
)
async def test_headers(http: httpx.AsyncClient, headers: list[tuple[str, bytes]]):
    head = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in headers)
    body = b'{"prompt": "a", "max_tokens": 2}'
    if not any(name == "content-length" for name, _ in headers):
        head += b"content-length: %d\r\n" % len(body)
    address = str(http.base_url).removeprefix("http://").split(":")
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(address[0], int(address[1].strip("/")))
        start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        kind = b"" if b"content-type" in head else b"content-type: application/json\r\n"
        writer.write(start + kind + head + b"\r\n" + body)
        status = (await reader.read()).split(b" ")[1]
        writer.close()
    assert status in (b"200", b"400", b"415", b"417", b"431"), status
