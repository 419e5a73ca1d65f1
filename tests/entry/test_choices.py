"""What concerns the text and the number of choices: stops, special tokens, echo, best_of."""

import asyncio
import itertools
import json
import re

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import byte_tokenizer, serving_grpc, serving_http
from test_client import connected

from jaxserve.entry.detokenizer import Detokenizer, StopAutomaton
from jaxserve.entry.proto import jaxserve_pb2 as pb
from jaxserve.entry.stop_patterns import compile_patterns
from jaxserve.types import (
    EngineDead,
    Grammar,
    InvalidRequest,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)


def earliest(text: str, patterns: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first, by the definition: look at every prefix."""
    for end in range(1, len(text) + 1):
        starts = [
            match.start()
            for pattern in patterns
            if (match := re.search(pattern, text[:end])) and match.end() > match.start()
        ]
        if starts:
            return min(starts), end
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab1 \n", max_size=30),
    patterns=st.lists(
        st.sampled_from(["a+b", "b1|1b1", r"\d\d", "a.b", r"\n\n", "(ab){2}", "^b1", "a1$"]),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    keep=st.booleans(),
)
def test_patterns_end_the_text_where_the_first_match_is_complete(text, patterns, cuts, keep):
    tokenizer = byte_tokenizer()
    found = earliest(text, patterns)
    detokenizer = Detokenizer(
        tokenizer, [], None, patterns=compile_patterns(patterns), keep_stop=keep
    )
    ids, pieces = tokenizer.encode(text, False), []
    bounds = sorted({0, *(cut for cut in cuts if cut < len(ids))})
    for start, end in itertools.pairwise([*bounds, len(ids)]):
        pieces.append(detokenizer.push(ids[start:end]))
        certain = "".join(pieces)  # what was told must stay true
        assert text.startswith(certain)
        if found is not None and not keep:
            assert len(certain) <= found[0]
    if found is None:
        assert "".join(pieces) + detokenizer.finish() == text
        assert detokenizer.stop_reason is None
    else:
        start, end = found
        assert "".join(pieces) == text[: end if keep else start]
        assert detokenizer.stop_reason == text[start:end]
        assert detokenizer.num_tokens == end  # one token a character


def test_strings_and_patterns_together_end_at_whichever_is_first():
    tokenizer = byte_tokenizer()
    for stop, pattern, text in (("lo", r"o, \w", "Hel"), ("zz", "l+", "He"), ("ll", "el+", "H")):
        detokenizer = Detokenizer(
            tokenizer, [], StopAutomaton([stop]), patterns=compile_patterns([pattern])
        )
        assert detokenizer.push(tokenizer.encode("Hello, world", False)) == text


def test_a_match_before_min_tokens_is_text():
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, [], None, 4, patterns=compile_patterns([r"\d+x"]))
    assert detokenizer.push(tokenizer.encode("1x 2x 3", False)) == "1x "
    assert detokenizer.stop_reason == "2x"


def test_patterns_that_cannot_be_are_refused_and_slow_ones_fail_their_request():
    for source in ("(", "a*", "x|", "[z-a]"):
        with pytest.raises(InvalidRequest, match="stop_regex"):
            compile_patterns([source])
    tokenizer = byte_tokenizer()
    slow = Detokenizer(tokenizer, [], None, patterns=(regex.compile(r"(a|a)+(a|a)+(a|aa)+$b"),))
    with pytest.raises(InvalidRequest, match="stop_regex"):
        slow.push(tokenizer.encode("a" * 5000, False))


def test_special_tokens_are_shown_as_the_library_shows_them():
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    ids = backend.encode("<s></s>a <s> b</s>").ids
    detokenizer = Detokenizer(byte_tokenizer(), [], skip_special=False)
    expected = backend.decode(ids, skip_special_tokens=False)
    assert detokenizer.push(ids) + detokenizer.finish() == expected == "<s></s>a <s> b</s>"
    assert Detokenizer(byte_tokenizer(), []).push(ids) == "a  b"


@pytest.mark.parametrize("interval", [1, 3, 4, 100])
async def test_stream_interval_groups_tokens(fake_engine, byte_level, interval):
    engine = fake_engine(byte_level)
    engine.answer = "The quick brown fox jumps over the lazy dog"
    async with connected(engine) as client:
        whole = (await client.generate("x"))[0]
        deltas = [d async for d in client.stream("x", SamplingParams(stream_interval=interval))]
    assert "".join(map(str, deltas)) == whole.text
    sizes = [len(delta.token_ids) for delta in deltas]
    assert sum(sizes) == len(whole.token_ids)
    assert sizes[0] == 1  # the first is not waited with
    assert all(size == interval for size in sizes[1:-1])
    assert deltas[-1].usage == whole.usage


async def test_echo_and_truncation(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        plain, echoed = [
            (await client.generate("brown fox", SamplingParams(echo=echo)))[0]
            for echo in (False, True)
        ]
        deltas = [d.text async for d in client.stream("brown fox", SamplingParams(echo=True))]
        assert echoed.text == "".join(deltas) == "brown fox" + plain.text
        assert echoed.token_ids == plain.token_ids
        ids = byte_level.encode("the lazy dog " * 200)
        for most, kept in ((3, 3), (1, 1), (-1, 256 - 20), (10**6, None)):
            params = SamplingParams(truncate_prompt_tokens=most, max_tokens=20)
            if kept is None:
                with pytest.raises(InvalidRequest, match="prompt"):
                    await client.generate("the lazy dog " * 200, params)
                continue
            output = (await client.generate("the lazy dog " * 200, params))[0]
            assert output.prompt_token_ids == ids[-kept:]


async def test_best_of_returns_the_likeliest_of_those_generated(fake_engine, byte_level):
    means = {0: -2.0, 1: -0.5, 2: -3.0, 3: -1.0}

    def script(request):
        index = int(request.request_id.rpartition("#")[2])
        ids = byte_level.encode(f"answer {index}", False)
        for i, token_id in enumerate(ids):
            yield TokenOutput(
                request_id=request.request_id,
                token_ids=[token_id],
                finish_reason="length" if i == len(ids) - 1 else None,
                num_cached_tokens=3,
                logprobs=[TokenLogprobs(means[index], [], [])],
            )

    engine = fake_engine(byte_level, script=script)
    async with connected(engine) as client:
        output = (await client.generate("x", SamplingParams(n=2, best_of=4, seed=5)))[0]
        assert [choice.text for choice in output.choices] == ["answer 1", "answer 3"]
        assert [choice.logprobs for choice in output.choices] == [None, None]
        assert output.usage.completion_tokens == 4 * len(byte_level.encode("answer 1", False))
        assert output.usage.cached_tokens == 3
        assert client.num_in_flight == 0
        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds)) == 4
        assert {request.sampling.logprobs for request in engine.requests} == {0}
        await client.generate("x", SamplingParams(n=4, seed=5))  # the same seeds, choice by choice
        assert [request.sampling.seed for request in engine.requests[4:]] == seeds
        shown = await client.generate("x", SamplingParams(best_of=4, logprobs=0))
        assert [token.logprob for token in shown[0].choices[0].logprobs] == [-0.5] * len(
            shown[0].token_ids
        )


async def test_best_of_with_logprobs_of_the_prompt_and_of_named_tokens(fake_engine, byte_level):
    def script(request):
        index = int(request.request_id.rpartition("#")[2])
        scored = [TokenLogprobs(-0.25, [], [], [-7.0])] * (len(request.token_ids) - 1)
        if request.sampling.prompt_logprobs is not None:
            yield TokenOutput(request_id=request.request_id, token_ids=[], prompt_logprobs=scored)
        yield TokenOutput(
            request_id=request.request_id,
            token_ids=byte_level.encode("a", False),
            finish_reason="length",
            logprobs=[TokenLogprobs(float(-index), [], [], [-9.0])],
        )

    params = SamplingParams(best_of=3, prompt_logprobs=0, token_ids_logprob=(5,))
    async with connected(fake_engine(byte_level, script=script)) as client:
        [output] = await client.generate("xyz", params)
        first, *rest = output.prompt_logprobs
        assert first is None
        assert [token.logprob for token in rest] == [-0.25] * (len(output.prompt_token_ids) - 1)
        [token] = output.choices[0].logprobs
        assert (token.logprob, [value for *_, value in token.named]) == (0.0, [-9.0])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5},
        {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}}, {"allowed_token_ids": (3,)},
        {"bad_words": ("a",)}, {"stop": "a"}, {"stop_regex": "a"}, {"prompt_logprobs": 0},
        {"token_ids_logprob": (3,)}, {"logprobs_mode": "processed_logprobs"}, {"logprobs": -1},
        {"grammar": Grammar.regex("a")},
    ],
)  # fmt: skip
async def test_beam_search_refuses_by_name_what_it_has_not(fake_engine, byte_level, fields):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        for method in (client.generate, client.open):
            with pytest.raises(InvalidRequest) as caught:
                await method("x", SamplingParams(n=2, use_beam_search=True, **fields))
            assert [caught.value.field] == list(fields)
        assert engine.requests == []


async def test_a_search_that_is_broken_off_leaves_nothing(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client:
        for params in (SamplingParams(best_of=3), SamplingParams(n=2, use_beam_search=True)):
            stream = await client.open("x", params)
            await asyncio.sleep(0.05)
            await stream.aclose()
            async with asyncio.timeout(2):
                while client.num_in_flight:
                    await asyncio.sleep(0.005)
            assert {choice.finish_reason for choice in stream.choices} == {"abort"}


async def test_a_search_fails_with_its_engine(fake_engine, byte_level):
    engine = fake_engine(byte_level, script=lambda request: iter(["die"]))
    async with connected(engine) as client:
        with pytest.raises(EngineDead):
            await client.generate("x", SamplingParams(n=2, use_beam_search=True))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 200}, "best_of"),
        ({"stop_regex": [""]}, "stop_regex"),
        ({"stop_regex": ["a"] * 17}, "stop_regex"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"n": None}, "n"),
        ({"use_beam_search": True, "early_stopping": "x"}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": 1000}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": float("nan")}, "length_penalty"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(fields, name):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.field == name


async def test_over_http():
    async with serving_http(reply="One 22 three ") as (served, http):

        async def ask(**fields):
            return await http.post("/v1/completions", json={"prompt": "ab", **fields})

        async def text(**fields):
            return (await ask(**fields)).json()["choices"][0]["text"]

        assert await text(stop_regex=r"\d+ ") == "One "
        assert await text(stop_regex=[r"\d+ t"], include_stop_str_in_output=True) == "One 22 t"
        assert await text(stop=["22", " three"], include_stop_str_in_output=True) == "One 22"
        assert await text(echo=True, max_tokens=3) == "abOne"
        answer = (await ask(best_of=3, max_tokens=2)).json()
        assert len(answer["choices"]) == 1
        assert answer["usage"]["completion_tokens"] == 6
        await ask(prompt="abcd", truncate_prompt_tokens=2)
        assert list(served.engine.requests[-1].token_ids) == byte_tokenizer().encode("cd", False)

        stream_options = {"include_usage": True, "continuous_usage_stats": True}
        lines = (await ask(max_tokens=4, stream=True, stream_options=stream_options)).text
        counts = [int(n) for n in re.findall(r'"completion_tokens":(\d+)', lines)]
        assert counts == [1, 2, 3, 4, 4]
        lines = (await ask(max_tokens=9, stream=True, stream_interval=4)).text
        assert re.findall(r'"text":"([^"]*)"', lines) == ["O", "ne 2", "2 th"]

        for fields, param in (
            ({"stop_regex": "("}, "stop_regex"),
            ({"stop_regex": 3}, "stop_regex"),
            ({"best_of": 2, "n": 3}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"use_beam_search": True, "stream": True}, "use_beam_search"),
            ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
            ({"use_beam_search": True, "stop": "a"}, "stop"),
            ({"use_beam_search": True, "n": 20}, "n"),
            ({"priority": 1}, "priority"),
            ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
            ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
            ({"max_tokens": 0, "echo": True, "best_of": 2}, "best_of"),
            ({"max_tokens": 0, "echo": True, "guided_regex": "a"}, "max_tokens"),
            ({"stream_interval": 2}, "stream_interval"),
            (
                {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                "stream_options.continuous_usage_stats",
            ),
        ):
            response = await ask(**fields)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param, fields
        for fields in ({"echo": True}, {"best_of": 0}):
            chat = {"messages": [{"role": "user", "content": "a"}], **fields}
            response = await http.post("/v1/chat/completions", json=chat)
            assert response.status_code == 400


async def test_echo_has_the_prompts_logprobs_in_front():
    """As OpenAI's completions had them, also for what is only asked about a prompt."""
    async with serving_http(reply="One 22 three ") as (_, http):

        async def ask(**fields):
            body = {"prompt": "ab", "echo": True, "logprobs": 2, **fields}
            return await http.post("/v1/completions", json=body)

        ids = byte_tokenizer().encode("<s>abOn", False)
        answer = (await ask(prompt=ids[:3], max_tokens=2)).json()
        [choice] = answer["choices"]
        assert choice["text"] == "abOn"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<s>", "a", "b", "O", "n"]
        assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
        assert logprobs["top_logprobs"][0] is None
        assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * 4
        assert "prompt_logprobs" not in choice
        shown = (await ask(prompt=ids[:3], max_tokens=2, skip_special_tokens=False)).json()
        assert shown["choices"][0]["text"] == "<s>abOn"
        assert shown["choices"][0]["logprobs"]["text_offset"] == [0, 3, 4, 5, 6]

        for fields in ({}, {"prompt": ["ab", "cde"], "n": 2}):
            answer = (await ask(max_tokens=0, **fields)).json()
            prompts = [p for p in fields.get("prompt", ["ab"]) for _ in range(fields.get("n", 1))]
            for choice, prompt in zip(answer["choices"], prompts, strict=True):
                assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
                assert choice["logprobs"]["tokens"] == list(prompt)
                expected = [None] + [-0.25] * (len(prompt) - 1)
                assert choice["logprobs"]["token_logprobs"] == expected
            assert answer["usage"]["completion_tokens"] == 0
        only = (await ask(logprobs=None, max_tokens=0)).json()["choices"][0]
        assert (only["text"], only["logprobs"]) == ("ab", None)

        for count in (0, 3):
            whole = (await ask(max_tokens=count)).json()["choices"][0]
            lines = (await ask(max_tokens=count, stream=True)).text.split("\n\n")[:-2]
            told = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
            assert "".join(one["text"] for one in told) == whole["text"]
            for name, values in whole["logprobs"].items():
                assert [v for one in told for v in one["logprobs"][name]] == values, name
            assert told[-1]["finish_reason"] == "length"


async def test_over_grpc():
    async with serving_grpc(reply="One 22 three ") as (_, stub):

        async def text(**fields) -> str:
            request = pb.GenerateRequest(text="ab", sampling=pb.SamplingParams(**fields))
            return "".join([answer.text async for answer in stub.Generate(request)])

        assert await text(stop_regex=[r"\d+ "], include_stop_str_in_output=True) == "One 22 "
        assert await text(echo=True, max_tokens=3) == "abOne"
        assert await text(best_of=2, max_tokens=2) == "On"
        assert await text(truncate_prompt_tokens=1, max_tokens=1, echo=True) == "bO"
        request = pb.GenerateRequest(text="ab", sampling=pb.SamplingParams(stream_interval=5))
        pieces = [answer.text async for answer in stub.Generate(request)]
        assert pieces == ["O", "ne 22", " thre", "e One"]


async def test_priority_reaches_an_engine_of_that_policy(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine, policy="priority") as client:
        await (await client.open("x", priority=-3)).result()
        assert engine.requests[-1].priority == -3
    other = fake_engine(byte_level)
    async with connected(other) as client:
        with pytest.raises(InvalidRequest, match="priority"):
            await client.open("x", priority=1)
