"""Keys, limits, request ids, origins, and what the log says."""

import json
import logging

import pytest
from server_fakes import serving_http
from test_http import check_error

from jaxserve.config import ServerConfig
from jaxserve.entry.serve import JsonLines
from jaxserve.types import ConfigError

BODY = {"prompt": "secret words", "max_tokens": 4}


async def test_without_a_key_only_probes_are_answered(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("second\nthird\n")
    async with serving_http(api_key=("first",), api_key_file=str(keys)) as (served, http):
        for headers in (
            {}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"},
            {"authorization": "first"}, {"authorization": "Basic first"},
            {"authorization": "Bearer first2"}, {"x-api-key": "first"},
        ):  # fmt: skip
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            error = check_error(response, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/get_server_info", "/openapi.json", "/health/../v1/models"):
            assert (await http.get(path)).status_code == 401
        assert served.engine.requests == []
        for key in ("first", "second", "third"):
            headers = {"authorization": f"bearer {key}"}
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 200
        for path in ("/health", "/metrics"):
            assert (await http.get(path)).status_code == 200


def test_keys_that_cannot_be_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for key in ("", " a", "ü"):
        with pytest.raises(ConfigError, match="api_key"):
            ServerConfig(api_key=(key,))
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="api_key_file"):
            ServerConfig(api_key_file=str(path)).all_api_keys()


async def test_request_ids_go_in_and_out(caplog):
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with serving_http() as (_, http):
        for path, body in (
            ("/v1/completions", BODY), ("/v1/completions", {**BODY, "stream": True}),
            ("/v1/completions", {}), ("/tokenize", {"prompt": "a"}),
        ):  # fmt: skip
            response = await http.post(path, json=body, headers={"x-request-id": "mine-1"})
            assert response.headers.get_list("x-request-id") == ["mine-1"]
        assert "client_id='mine-1'" in caplog.records[0].getMessage()
        own = await http.post("/v1/completions", json=BODY)
        assert own.headers["x-request-id"] == own.json()["id"]
        assert (await http.get("/nothing")).headers["x-request-id"]
        for bad in ("a" * 200, "a b"):
            response = await http.post("/v1/completions", json=BODY, headers={"x-request-id": bad})
            assert response.headers["x-request-id"] == response.json()["id"]


async def test_head_is_get_without_the_body():
    async with serving_http(api_key=("k",)) as (_, http):
        headers = {"authorization": "Bearer k"}
        paths = ("/health", "/metrics", "/", "/v1/models", "/v1/models/tiny", "/openapi.json",
                 "/v1/models/other", "/v1/responses/none", "/nothing")  # fmt: skip
        for path in paths:
            got, head = [await http.request(m, path, headers=headers) for m in ("GET", "HEAD")]
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            if path != "/metrics":  # which counts on
                assert head.headers["content-length"] == str(len(got.content))
        assert (await http.head("/health")).status_code == 200
        assert (await http.head("/v1/models")).status_code == 401
        head = await http.head("/v1/completions", headers=headers)
        assert (head.status_code, head.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/engine_state"), ("GET", "/tokenizer_info"), ("GET", "/openapi.json"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"), ("GET", "/v1/responses/none"), ("GET", "/get_model_info"),
        ("GET", "/v1/files/none"), ("GET", "/health_generate"), ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"), ("POST", "/generate"), ("POST", "/flush_cache"),
        ("POST", "/v1/files"), ("POST", "/v1/batches"),
    ],
)  # fmt: skip
async def test_a_query_that_nobody_reads_is_refused(method, path, tmp_path):
    async with serving_http(files_dir=str(tmp_path)) as (served, http):
        response = await http.request(method, f"{path}?limit=1&nothing=2", json=BODY)
        check_error(response, 400, "limit")
        assert (served.engine.requests, served.engine.num_flushes) == ([], 0)
        if path == "/engine_state":  # once for all
            check_error(await http.get("/v1/files?limit=1&nothing=2"), 400, "nothing")
            for good in ("/health?t=1", "/metrics?t=1", "/?t=1", "/web/page.js?t=1"):
                assert (await http.get(good)).status_code == 200
            check_error(await http.get("/nothing?limit=1"), 404)


async def test_huge_headers_are_refused():
    async with serving_http() as (_, http):
        response = await http.post("/v1/completions", json=BODY, headers={"x": "a" * 40_000})
        assert check_error(response, 431)["code"] == "headers_too_large"
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_origins_that_are_allowed_and_no_others():
    ask = {"access-control-request-method": "POST", "origin": "https://page.example"}
    async with serving_http(cors_origin=("https://page.example",), api_key=("k",)) as (_, http):
        preflight = await http.options("/v1/completions", headers=ask)
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        headers = {"origin": "https://page.example", "authorization": "Bearer k"}
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        headers["origin"] = "https://other.example"
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        assert "access-control-allow-origin" not in response.headers


async def test_log_lines_are_structured_and_hold_text_only_when_asked(caplog):
    caplog.set_level(logging.INFO, "jaxserve.access")
    for wanted in (False, True):
        caplog.clear()
        async with serving_http(log_text=wanted) as (_, http):
            await http.post("/v1/completions", json={**BODY, "user": "someone", "n": 2})
        [record] = [r for r in caplog.records if r.name == "jaxserve.access"]
        line = json.loads(JsonLines().format(record))
        assert line["verb"] == "POST /v1/completions"
        assert line["status"] == "200"
        assert (line["user"], line["prompt"], line["generated"]) == ("someone", 12, 8)
        assert line["finish"] == "length,length"
        assert line["total"] >= line["first"] if "first" in line else line["total"] > 0
        if wanted:
            assert line["prompts"] == ["secret words"]
            assert line["texts"] == [["Hell", "Hell"]]
        else:
            assert "secret" not in json.dumps(line)
            assert "Hell" not in json.dumps(line)


async def test_responses_are_counted_by_few_endpoints_and_statuses():
    async with serving_http(api_key=("key",)) as (served, http):
        key = {"authorization": "Bearer key"}
        for _ in range(3):
            await http.post("/v1/completions", json={**BODY, "stream": True}, headers=key)
        await http.post("/v1/completions", json={"prompt": 5}, headers=key)
        for i in range(4):
            await http.get(f"/v1/models/number-{i}", headers=key)
            await http.get(f"/nowhere/{i}", headers=key)
            await http.request(f"ODD{i}", "/tokenize", headers=key)
            await http.post(f"/v1/completions?{i}", json=BODY)
        found = {
            (sample.labels["endpoint"], sample.labels["status_code"]): sample.value
            for family in served.server.metrics.collect()
            for sample in family.samples
            if sample.name == "jaxserve_http_responses_total"
        }
        assert found == {
            ("/v1/completions", "200"): 3, ("/v1/completions", "400"): 1,
            ("/v1/models/{model:path}", "404"): 4, ("/tokenize", "405"): 4,
            ("unknown", "404"): 4, ("unknown", "401"): 4,
        }  # fmt: skip
