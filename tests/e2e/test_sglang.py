"""SGLang's two calls: the second prompt goes on from the first's, and its prefix is cached."""

import asyncio
import io
import json
import re

import httpx

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.entry.client import Client
from jaxserve.entry.serve import Server

FIRST = "Once upon a time in a town by the sea there was a lighthouse whose keeper"


async def test_the_second_call_has_the_firsts_prefix_from_the_cache(tiny_folder):
    def make_client(config, observer, on_progress):
        return Client(config, process="thread", observer=observer, on_progress=on_progress)

    config = EngineConfig(
        model=str(tiny_folder), max_num_seqs=4, max_batched_tokens=32, num_pages=64
    )
    server = Server(config, ServerConfig(port=0), make_client=make_client, out=io.StringIO())
    task = asyncio.ensure_future(server.run())
    try:
        async with asyncio.timeout(240):
            await server.ready.wait()
        assert server.addresses is not None
        url = f"http://127.0.0.1:{server.addresses.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def hits() -> float:
                text = (await http.get("/metrics")).text
                [value] = re.findall(r"^jaxserve_prefix_cache_hits_total\S* (\S+)$", text, re.M)
                return float(value)

            params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
            body = {"text": FIRST, "sampling_params": params}
            # as curl sends it: -H 'Content-Type: application/json' -d '...'
            headers = {"content-type": "application/json"}
            first = (await http.post("/generate", content=json.dumps(body), headers=headers)).json()
            assert first["meta_info"]["completion_tokens"] == 30
            assert first["meta_info"]["cached_tokens"] == 0
            ids = (await http.post("/tokenize", json={"prompt": FIRST})).json()["tokens"]
            longer = [*ids, *first["output_ids"], 70, 71, 72]
            before = await hits()
            body = {"input_ids": longer, "sampling_params": params}
            second = (await http.post("/generate", json=body)).json()
            # The KV of the last token generated was never needed, so never computed.
            whole = (len(ids) + 30 - 1) // 16 * 16
            assert second["meta_info"]["cached_tokens"] == whole >= 96
            assert await hits() - before == whole
            # As text: what the first call said need not tokenize to the tokens that it was.
            text = FIRST + first["text"] + " And then"
            told = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            third = (
                await http.post("/generate", json={"text": text, "sampling_params": params})
            ).json()
            same = next(
                (i for i, (a, b) in enumerate(zip(told, longer, strict=False)) if a != b),
                min(len(told), len(longer)),
            )
            assert third["meta_info"]["cached_tokens"] >= min(same, whole) // 16 * 16
    finally:
        server.stop()
        server.stop()
        async with asyncio.timeout(30):
            await task
