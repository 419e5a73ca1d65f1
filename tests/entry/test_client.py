"""The asyncio client against a scripted engine: text, ends, cancellation, limits, death."""

import asyncio
import contextlib
import enum
import logging
from array import array

import pytest

from jaxserve import messages
from jaxserve.config import EngineConfig
from jaxserve.entry.client import Client
from jaxserve.entry.request_stream import MAX_UNREAD
from jaxserve.types import (
    CheckpointError,
    ContextExceeded,
    EngineDead,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)

TIMEOUT_S = 5


@contextlib.asynccontextmanager
async def connected(engine, observer=None, **settings):
    client = Client(
        EngineConfig(**settings),
        start_engine=engine.start_engine,
        load_model=engine.load_model,
        observer=observer,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S * 2):
            yield await client.start()
    finally:
        await client.close()


async def eventually(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Recorder:
    def __init__(self):
        self.events = []

    def on_refused(self):
        self.events.append(("refused",))

    def on_request_start(self, num_prompt_tokens, params):
        self.events.append(("start", num_prompt_tokens, params.n))

    def on_first_token(self, seconds):
        assert seconds >= 0
        self.events.append(("first",))

    def on_tokens(self, num_tokens, seconds):
        self.events.append(("tokens", num_tokens, seconds is None))

    def on_request_finish(self, reason, usage, times):
        assert times.total_s >= (times.first_token_s or 0)
        self.events.append(("finish", reason, usage.completion_tokens))


# Text


@pytest.mark.parametrize("chunk", [1, 3])
async def test_streamed_equals_whole(fake_engine, byte_level, chunk):
    engine = fake_engine(byte_level, chunk=chunk)
    engine.answer = "Grüße, 你好 🤗! Paris"
    async with connected(engine) as client:
        whole = (await client.generate("The capital"))[0]
        deltas = [delta async for delta in client.stream("The capital")]
    assert whole.text == engine.answer == "".join(map(str, deltas))
    assert whole.token_ids == [token for delta in deltas for token in delta.token_ids]
    assert whole.finish_reason == deltas[-1].finish_reason == "stop"
    assert whole.usage == deltas[-1].usage
    assert all(delta.usage is None and delta.finish_reason is None for delta in deltas[:-1])


async def test_stop_token_is_among_the_ids_but_not_in_the_text(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    engine.answer = "dog END fox"
    end = byte_level.encode(" END", False)[-1]
    async with connected(engine) as client:
        result = (await client.generate("x", SamplingParams(stop_token_ids=(end,))))[0]
        natural = (await client.generate("x"))[0]
    assert result.token_ids[-1] == end
    assert not result.text.endswith(byte_level.token_text(end))
    assert (result.finish_reason, result.choices[0].stop_reason) == ("stop", end)
    assert (natural.finish_reason, natural.choices[0].stop_reason) == ("stop", None)
    assert natural.token_ids[-1] in byte_level.eos_token_ids


@pytest.mark.parametrize("chunk", [1, 2, 50])
async def test_stop_string_ends_the_request_here_and_in_the_engine(fake_engine, byte_level, chunk):
    engine = fake_engine(byte_level, chunk=chunk)
    engine.answer = "The quick brown fox STOP and more of it, much more"
    async with connected(engine) as client:
        deltas = [d async for d in client.stream("x", SamplingParams(stop=" STOP"))]
        assert "".join(map(str, deltas)) == "The quick brown fox"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " STOP")
        ids = [token for delta in deltas for token in delta.token_ids]
        assert byte_level.decode(ids).endswith("STOP")
        assert deltas[-1].usage.completion_tokens == len(ids)
        assert client.num_in_flight == 0
        if chunk < 50:
            await eventually(lambda: engine.aborted == [deltas[0].request_id])


async def test_min_tokens_keeps_early_stop_strings(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    engine.answer = "a b a b a b"
    length = len(byte_level.encode(engine.answer, False))
    async with connected(engine) as client:
        params = SamplingParams(stop="b", min_tokens=length, max_tokens=length + 5)
        result = (await client.generate("x", params))[0]
    assert (result.text, result.choices[0].stop_reason) == ("a b a b a ", "b")


async def test_length_and_held_back_text(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    engine.answer = "EN"
    async with connected(engine) as client:
        params = SamplingParams(stop="END", max_tokens=len(byte_level.encode("EN", False)))
        result = (await client.generate("x", params))[0]
    assert (result.text, result.finish_reason) == ("EN", "length")


async def test_choices_share_the_prompt_and_have_their_own_seeds(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        first = await client.generate("The dog", SamplingParams(n=3, seed=11))
        await client.generate("The dog", SamplingParams(n=3, seed=11))
        await client.generate("The dog", SamplingParams(n=2))
        deltas = [d async for d in client.stream("The dog", SamplingParams(n=2))]
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 11
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds)) == 3 + 2 + 2
    assert [choice.index for choice in first[0].choices] == [0, 1, 2]
    assert first[0].usage.prompt_tokens == len(byte_level.encode("The dog"))
    assert first[0].usage.completion_tokens == 3 * len(first[0].token_ids)
    assert {delta.index for delta in deltas} == {0, 1}
    assert [delta.usage is not None for delta in deltas].count(True) == 1
    assert deltas[-1].usage is not None


async def test_logprobs_have_text_and_follow_the_ids(fake_engine, byte_level):
    def script(request):
        for token in byte_level.encode("ab STOP ab", False):
            entry = TokenLogprobs(-0.5, [token, 5], [-0.5, -1.5])
            yield TokenOutput(request_id=request.request_id, token_ids=[token], logprobs=[entry])

    async with connected(fake_engine(byte_level, script=script)) as client:
        params = SamplingParams(logprobs=2, stop="STOP")
        choice = (await client.generate("x", params))[0].choices[0]
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    entry = choice.logprobs[0]
    assert entry.token == byte_level.token_text(choice.token_ids[0])
    assert entry.top == [
        (entry.token, entry.token_id, -0.5),
        (byte_level.token_text(5), 5, -1.5),
    ]


async def test_chat_goes_through_the_template(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    conversation = [{"role": "user", "content": "hi dog"}]
    async with connected(engine) as client:
        results = await client.chat(conversation)
        both = await client.chat([conversation, conversation])
        deltas = [delta async for delta in client.chat_stream(conversation)]
        text = await client.detokenize(engine.requests[0].token_ids, skip_special_tokens=False)
    assert text == "<|start|>user\nhi dog<|end|>\n<|start|>assistant\n"
    assert [r.text for r in [*results, *both]] == [engine.answer] * 3
    assert "".join(map(str, deltas)) == engine.answer


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "template", "field"),
    [
        ({"role": "assistant", "content": "", "tool_calls": CALLS}, {}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "noon"}, {}, "messages[1].role"),
        ({"role": "user", "content": "a"}, {"tools": CALLS}, "tools"),
    ],
)
async def test_what_the_template_has_no_place_for_is_refused(
    fake_engine, byte_level, message, template, field
):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        conversation = [{"role": "user", "content": "When?"}, message]
        with pytest.raises(InvalidRequest, match="chat template has no 'tool") as caught:
            await client.chat([conversation], template=template)
        assert caught.value.field == field
    assert engine.requests == []


async def test_chat_template_brings_no_second_bos(fake_engine, sentencepiece):
    from jaxserve.entry.chat_template import ChatTemplate

    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    sentencepiece.chat_template = ChatTemplate(source, bos_token="<s>")
    try:
        async with connected(fake_engine(sentencepiece)) as client:
            ids = await client.chat_prompt([{"role": "user", "content": "the cat"}])
    finally:
        sentencepiece.chat_template = None
    assert ids.count(sentencepiece.bos_token_id) == 1


async def test_model_without_template_names_the_alternative(fake_engine, sentencepiece):
    async with connected(fake_engine(sentencepiece)) as client:
        with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
            await client.chat([{"role": "user", "content": "hi"}])


async def test_model_without_tokenizer_takes_ids_only(fake_engine):
    def script(request):
        yield TokenOutput(request_id=request.request_id, token_ids=[7, 8], finish_reason="length")

    async with connected(fake_engine(script=script)) as client:
        result = (await client.generate([[1, 2, 3]]))[0]
        assert (result.text, result.token_ids) == ("", [7, 8])
        for call in (client.generate("text"), client.tokenize("a"), client.detokenize([1])):
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await call
        with pytest.raises(InvalidRequest, match="stop"):
            await client.generate([1], SamplingParams(stop="x"))


# Parameters


async def test_open_parameters_are_the_models_then_openais(fake_engine, byte_level):
    engine = fake_engine(byte_level, defaults=SamplingParams(temperature=0.6, top_k=20))
    async with connected(engine) as client:
        await client.generate("a")
        await client.generate("a", SamplingParams(temperature=0, top_k=-1, top_p=0.5, max_tokens=9))
        await client.generate(
            "a", SamplingParams(ignore_eos=True, stop_token_ids=[9], max_tokens=9)
        )
    first, second, third = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (0.6, 20, 1.0, 0.0)
    assert first.max_tokens == 256 - len(engine.requests[0].token_ids)
    assert set(first.stop_token_ids) == byte_level.eos_token_ids
    assert (second.temperature, second.top_k, second.top_p, second.max_tokens) == (0, 0, 0.5, 9)
    assert third.stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "field"),
    [
        ("", {}, InvalidRequest, "prompt"),
        ([], {}, InvalidRequest, "prompt"),
        ([1, 512], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([1, "a"], {}, InvalidRequest, "prompt"),
        ([True], {}, InvalidRequest, "prompt"),
        ([1.5], {}, InvalidRequest, "prompt"),
        ([1, 2**70], {}, InvalidRequest, "prompt"),
        ("a\ud800", {}, InvalidRequest, "prompt"),
        ([1] * 200, {}, ContextExceeded, "prompt"),
        ([1] * 199, {"max_tokens": 2}, ContextExceeded, "max_tokens"),
        ([1] * 100, {"min_tokens": 150}, ContextExceeded, "min_tokens"),
        ("a" * 100_000, {}, InvalidRequest, "prompt"),
        ([1], {"stop_token_ids": [512]}, InvalidRequest, "stop_token_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_the_engine(
    fake_engine, byte_level, prompt, params, error, field
):
    engine = fake_engine(byte_level, info=fake_engine.info(max_request_tokens=200))
    async with connected(engine) as client:
        with pytest.raises(error) as caught:
            await client.open(prompt, SamplingParams(**params))
        assert caught.value.field == field
        with pytest.raises(error):
            await client.generate(["fine", prompt], SamplingParams(**params))
        assert (await client.generate("still fine"))[0].text == engine.answer
    assert len(engine.requests) == 1


async def test_token_ids_come_in_any_sequence_of_integers(fake_engine, byte_level):
    Id = enum.IntEnum("Id", ["ONE", "TWO"])
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        for prompt in ([1, 2], (1, 2), range(1, 3), array("q", [1, 2]), [Id.ONE, Id.TWO]):
            result = (await client.generate([prompt]))[0]
            assert list(map(type, result.prompt_token_ids)) == [int, int]
    assert [list(request.token_ids) for request in engine.requests] == [[1, 2]] * 5


async def test_exactly_the_context_fits(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        await client.generate([3] * 255)
        await client.generate([3] * 200, SamplingParams(max_tokens=56))
    assert [request.sampling.max_tokens for request in engine.requests] == [1, 56]


async def test_params_are_one_or_one_each(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
        results = await client.generate(["a", "b"], each)
        with pytest.raises(InvalidRequest, match="params"):
            await client.generate(["a"], each)
        with pytest.raises(InvalidRequest, match="prompts"):
            await client.generate([{"a": 1}.keys()])
    assert [len(result.token_ids) for result in results] == [1, 2]


# Ends


async def test_results_come_in_the_prompts_order(fake_engine, byte_level):
    def script(request):
        yield from fake_engine.steps_of(request, request.token_ids[: len(request.token_ids)])

    prompts = ["fox " * k for k in (9, 1, 5, 3, 7)] * 4
    async with connected(fake_engine(byte_level, script=script), max_queue=2) as client:
        finished = []
        results = await client.generate(prompts, on_finish=finished.append)
    assert [result.text for result in results] == prompts
    assert len(finished) == len(prompts)


@pytest.mark.parametrize("how", ["cancel", "close", "break", "collect", "error in the loop"])
async def test_whoever_stops_reading_aborts(fake_engine, byte_level, how):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client:
        begun = asyncio.Event()

        async def consume():
            if how == "collect":
                begun.set()
                await client.generate("x", SamplingParams(n=2))
            async for _ in client.stream("x", SamplingParams(n=2)):
                begun.set()
                if how == "break":
                    break
                if how == "error in the loop":
                    raise KeyError

        task = asyncio.ensure_future(consume())
        if how == "close":
            task.cancel()
            generator = client.stream("x", SamplingParams(n=2))
            engine.allow()
            await anext(generator)
            await generator.aclose()
        else:
            engine.allow(0 if how == "collect" else 1)
            await begun.wait()
            await eventually(lambda: len(engine.requests) == 2)
            if how in ("cancel", "collect"):
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError, KeyError):
            await task
        await eventually(
            lambda: set(engine.aborted) == {request.request_id for request in engine.requests}
        )
        assert client.num_in_flight == 0
        assert len(engine.aborted) == 2


async def test_stream_that_is_cancelled_before_it_begins_leaves_nothing(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client:
        for _ in range(5):
            task = asyncio.ensure_future(client.generate(["a", "b", "c"]))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert client.num_in_flight == 0
        await eventually(
            lambda: sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)
        )


async def test_abort_ends_with_the_text_so_far(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    engine.answer = "The EN"
    async with connected(engine) as client:
        params = SamplingParams(stop="END")
        async with await client.open("x", params, request_id="mine") as stream:
            engine.allow(len(byte_level.encode("The EN", False)))
            deltas = [await anext(stream)]
            await eventually(lambda: len(stream.choices[0].token_ids) >= 2)
            assert await client.abort("mine")
            deltas += [delta async for delta in stream]
        assert deltas[-1].finish_reason == "abort"
        assert deltas[-1].usage is not None
        assert engine.answer.startswith("".join(map(str, deltas)))
        assert not await client.abort("mine")
        assert not await client.abort("never was")
        await eventually(lambda: engine.aborted == ["mine"])


async def test_ids_of_choices_are_nobodys_requests(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client:
        streams = [
            await client.open("a", SamplingParams(n=n), request_id=name)
            for name, n in (("foo", 2), ("foo#0", 1), ("foo-1", 1), ("foo-1#1", 2))
        ]
        for stream in streams:
            await stream.aclose()


async def test_same_request_id_twice_is_refused(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client, await client.open("x", request_id="a"):
        with pytest.raises(InvalidRequest, match="request_id"):
            await client.open("x", request_id="a")


async def test_full_queue_refuses_at_once_and_frees_again(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)  # 4 sequences
    async with connected(engine, max_queue=1) as client:
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(5):
                await streams.enter_async_context(await client.open("x"))
            with pytest.raises(QueueFull):
                await client.open("x")
            waiting = asyncio.ensure_future(client.generate("x"))  # waits instead
            await asyncio.sleep(0.01)
            assert client.num_in_flight == 5
        engine.allow(100)
        assert (await waiting)[0].text == engine.answer
        # more choices than the limit still run alone
        assert len((await client.generate("x", SamplingParams(n=9)))[0].choices) == 9


async def test_error_of_one_request_leaves_the_others(fake_engine, byte_level):
    def script(request):
        if len(request.token_ids) == 1:
            yield TokenOutput(
                request_id=request.request_id, token_ids=[], finish_reason="error", error="too odd"
            )
        yield from fake_engine.steps_of(request, [65, 66])

    async with connected(fake_engine(byte_level, script=script)) as client:
        good = asyncio.ensure_future(client.generate([[1, 2]]))
        with pytest.raises(RequestFailed, match="too odd"):
            await client.generate([[1]])
        with pytest.raises(RequestFailed, match="too odd"):
            async for _ in client.stream([1]):
                pass
        assert (await good)[0].token_ids == [65, 66]
        client.health()


# Life and death


@pytest.mark.parametrize("how", ["fatal", "exit"])
async def test_engine_death_reaches_everybody_at_once(fake_engine, byte_level, how, caplog):
    def script(request):
        yield TokenOutput(request_id=request.request_id, token_ids=[65])
        if request.request_id == "killer":
            yield messages.Fatal("Boom: out of luck") if how == "fatal" else "die"
        while True:
            yield TokenOutput(request_id=request.request_id, token_ids=[])

    async with connected(fake_engine(byte_level, script=script)) as client:
        waiters = [asyncio.ensure_future(client.generate("x")) for _ in range(3)]
        stream = await client.open("x", request_id="killer")
        with pytest.raises(EngineDead, match="out of luck" if how == "fatal" else "exit code 3"):
            async for _ in stream:
                pass
        for waiter in waiters:
            with pytest.raises(EngineDead):
                await waiter
        reason = await client.wait_dead()
        for call in (client.generate("x"), client.open("x"), client.tokenize("x"), client.start()):
            with pytest.raises(EngineDead, match=reason.split()[-1].strip("()")):
                await call
        with pytest.raises(EngineDead):
            client.health()
        assert client.num_in_flight == 0
    assert "engine" in caplog.text


@pytest.mark.parametrize(
    ("fatal", "error", "text"),
    [
        (messages.Fatal("CheckpointError: no such file", "CheckpointError"), CheckpointError, "no"),
        (messages.Fatal("KeyError: 'x'", "KeyError"), EngineDead, "KeyError"),
        (messages.Stopped(), EngineDead, "ended"),
    ],
)
async def test_engine_that_does_not_start_says_why(fake_engine, byte_level, fatal, error, text):
    engine = fake_engine(byte_level, start_messages=[messages.Progress("load", "weights"), fatal])
    heard = []
    client = Client(
        EngineConfig(),
        start_engine=engine.start_engine,
        load_model=engine.load_model,
        on_progress=heard.append,
    )
    with pytest.raises(error, match=text):
        await client.start()
    with pytest.raises(EngineDead):
        await client.generate("x")
    assert [progress.stage for progress in heard] == ["load"]
    await client.close()


async def test_tokenizer_that_cannot_be_read_ends_the_start(fake_engine):
    engine = fake_engine(start_messages=[messages.Progress("load", "for a long time")])

    def load_model(name):
        raise CheckpointError("tokenizer.json: broken")

    client = Client(EngineConfig(), start_engine=engine.start_engine, load_model=load_model)
    with pytest.raises(CheckpointError, match="broken"):
        await client.start()
    await client.close()


async def test_tokens_that_the_model_lacks_are_refused(fake_engine, byte_level, caplog):
    size = byte_level.token_id("<think>")
    engine = fake_engine(byte_level, info=fake_engine.info(vocab_size=size))
    async with connected(engine) as client:
        assert (await client.generate("x"))[0].text == engine.answer
        with pytest.raises(InvalidRequest, match=str(size)):
            await client.generate("x<think>")
    assert "refused" in caplog.text


async def test_last_tokens_within_the_grace_arrive(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    async with connected(engine) as client:
        waiting = asyncio.ensure_future(client.generate("x"))
        await eventually(lambda: engine.requests)
        await client.close(grace_s=2)
        assert (await waiting)[0].text == engine.answer


async def test_detokenize_checks_its_ids(fake_engine, byte_level):
    async with connected(fake_engine(byte_level)) as client:
        assert await client.detokenize([]) == ""
        assert await client.detokenize([511]) == ""  # padding of the model's vocabulary
        for ids in ([-1], [512], ["a"]):
            with pytest.raises(InvalidRequest, match="tokens"):
                await client.detokenize(ids)


async def test_many_first_calls_start_one_engine(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    client = Client(EngineConfig(), start_engine=engine.start_engine, load_model=engine.load_model)
    with pytest.raises(EngineDead, match="starting"):
        client.health()
    impatient = asyncio.ensure_future(client.start())
    await asyncio.sleep(0)
    impatient.cancel()
    results = await asyncio.gather(*(client.generate("x") for _ in range(5)))
    assert all(result[0].text == engine.answer for result in results)
    assert len(engine.threads) == 1
    await client.close()


async def test_close_tells_those_who_wait_and_refuses_the_rest(fake_engine, byte_level):
    engine = fake_engine(byte_level, hold=True)
    async with connected(engine) as client:
        waiting = asyncio.ensure_future(client.generate("x"))
        await eventually(lambda: engine.requests)
        await client.close(grace_s=0.5)
        with pytest.raises(EngineDead, match="shut down"):
            await waiting
        with pytest.raises(EngineDead, match="shut down"):
            await client.generate("x")
        await client.close()
    assert engine.shutdowns[0] == 0.5


async def test_closing_while_it_starts_ends_the_start(fake_engine, byte_level):
    engine = fake_engine(byte_level, start_messages=[messages.Progress("load", "slowly")])
    client = Client(EngineConfig(), start_engine=engine.start_engine, load_model=engine.load_model)
    starting = asyncio.ensure_future(client.start())
    await eventually(lambda: engine.threads)
    await client.close()
    with pytest.raises((EngineDead, asyncio.CancelledError)):
        await starting


async def test_observer_and_log_hear_of_every_request(fake_engine, byte_level, caplog):
    engine = fake_engine(byte_level)
    engine.answer = "secret words"
    recorder = Recorder()
    with caplog.at_level(logging.INFO, "jaxserve.requests"):
        async with connected(engine, recorder) as client:
            await client.generate("private question", SamplingParams(n=2))
            async with await client.open("private question", request_id="left"):
                pass
            assert client.stats().num_steps == 1
    kinds = [event[0] for event in recorder.events]
    assert kinds.count("start") == kinds.count("finish") == 2
    assert kinds.count("first") == 1
    num_tokens = len(byte_level.encode(engine.answer, False)) + 1
    assert ("finish", "stop", 2 * num_tokens) in recorder.events
    assert ("finish", "abort", 0) in recorder.events
    assert sum(event[1] for event in recorder.events if event[0] == "tokens") == 2 * num_tokens
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxserve.requests"]
    assert len(lines) == 2
    assert lines[1].startswith("left: abort")
    assert "secret" not in caplog.text
    assert "private" not in caplog.text


async def test_long_prompt_does_not_hold_up_a_stream(fake_engine, byte_level):
    engine = fake_engine(byte_level, info=fake_engine.info(max_request_tokens=10**6))
    async with connected(engine) as client:
        long = asyncio.ensure_future(client.tokenize("The quick brown fox. " * 50_000))
        results = await client.generate(["x"] * 3)
        assert not long.done()
        assert len(results) == 3
        assert len(await long) > 100_000


async def test_random_requests_all_end_and_leave_nothing(fake_engine, byte_level):
    import random

    generator = random.Random(3)
    engine = fake_engine(byte_level, chunk=2)
    engine.answer = "The quick brown fox jumps over the lazy dog. 你好 STOP it"

    async def one(client, index):
        params = SamplingParams(
            n=generator.choice([1, 1, 3]),
            max_tokens=generator.choice([None, 1, 7]),
            stop=generator.choice([(), "STOP", ("lazy", "xyz")]),
        )
        await asyncio.sleep(generator.random() * 0.05)
        seen = {}
        async with await client.open("x", params, queue="wait", request_id=str(index)) as stream:
            async for delta in stream:
                seen[delta.index] = seen.get(delta.index, "") + delta.text
                if generator.random() < 0.02:
                    return
        assert all(engine.answer.startswith(text) for text in seen.values())
        assert "STOP" not in "".join(seen.values()) or params.stop != ("STOP",)

    async with connected(engine, max_queue=3) as client:
        await asyncio.gather(*(one(client, index) for index in range(60)))
        assert client.num_in_flight == 0
        assert not client._streams


async def test_a_reader_who_is_behind_gets_larger_pieces(byte_level, fake_engine):
    """Nothing is lost, and what waits for a reader that doesn't read stays small."""
    fake = fake_engine(byte_level)
    fake.answer = "All work and no play makes Jack a dull boy. " * 40
    async with connected(fake) as client:
        params = SamplingParams(max_tokens=240, ignore_eos=True, n=2, logprobs=1)
        async with await client.open("a", params) as stream:
            while not stream.finished:
                await asyncio.sleep(0.01)
            assert len(stream._deltas) <= MAX_UNREAD
            deltas = [delta async for delta in stream]
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        choice = stream.choices[index].choice()
        assert "".join(delta.text for delta in own) == choice.text
        assert [id for delta in own for id in delta.token_ids] == choice.token_ids
        assert [p for delta in own for p in delta.logprobs or ()] == (choice.logprobs or [])
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [
            True
        ]
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


@pytest.mark.parametrize(("size", "expected"), [(100, 16), (245, 11), (255, 1)])
async def test_a_default_of_max_tokens_gives_way_to_the_context(
    byte_level, fake_engine, size, expected
):
    fake = fake_engine(byte_level)
    async with connected(fake) as client:
        stream = await client.open([5] * size, default_max_tokens=16)
        await stream.aclose()
    assert fake.requests[-1].sampling.max_tokens == expected


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "x"},
        {"priority": 2**70},
        {"priority": True},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"request_id": 5},
        {"request_id": "a\nb"},
    ],
)
async def test_options_that_the_engine_cannot_take_are_refused_and_leave_nothing(
    byte_level, fake_engine, options
):
    fake = fake_engine(byte_level)
    async with connected(fake) as client:
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            await client.open("a", **options)
        assert client.num_in_flight == 0
        assert fake.requests == []
