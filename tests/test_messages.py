"""The link between entry and engine."""

import asyncio
import enum
import socket
import threading
import time
from array import array

import numpy as np
import pytest

from jaxserve import messages
from jaxserve.types import Request, TokenSampling

LARGE = 3_000_000
"""Characters: more than a socket holds, and than is read at a time."""


async def sockets():
    own, other = socket.socketpair()
    return await messages.SocketClientEnd.open(own), messages.SocketEngineEnd(other)


@pytest.fixture(params=["queue", "sockets"])
async def link(request):
    if request.param == "queue":
        engine = messages.QueueEngineEnd()
        client = engine.connect()
    else:
        client, engine = await sockets()
    yield client, engine
    client.close()
    await asyncio.to_thread(engine.close)


async def test_what_one_turn_of_the_loop_sends_comes_together_and_in_order(link):
    client, engine = link
    received = []
    reader = threading.Thread(target=lambda: received.append(engine.receive(5.0)))
    reader.start()  # and waits for a first message

    async def send(index: int) -> None:
        client.send(messages.Abort([str(index)]))

    await asyncio.gather(*(send(i) for i in range(20)))
    await asyncio.to_thread(reader.join)
    assert received == [[messages.Abort([str(i)]) for i in range(20)]]
    client.send(messages.FlushCache())
    await asyncio.sleep(0.05)
    assert engine.receive(5.0) == [messages.FlushCache()]
    assert engine.receive(0) == []


async def test_a_closed_link_sends_nothing_more(link):
    client, engine = link
    client.send(messages.FlushCache())
    client.close()
    await asyncio.sleep(0.01)
    assert engine.receive(0) == []


async def test_large_messages_arrive_whole_and_in_order(link):
    client, engine = link
    sent = [messages.Vocabulary(letter * LARGE, [1]) for letter in "ab"]
    told = [messages.Fatal(letter * LARGE) for letter in "cd"]

    def run() -> list[messages.ToEngine]:
        received: list[messages.ToEngine] = []
        for message in told:
            engine.send(message)
        while len(received) < len(sent):
            received += engine.receive(5.0)
        return received

    running = asyncio.ensure_future(asyncio.to_thread(run))
    for message in sent:
        client.send(message)
        await asyncio.sleep(0)
    assert [await client.receive() for _ in told] == told
    assert await running == sent


async def test_a_client_that_does_not_read_holds_no_engine_up(link):
    client, engine = link
    told = [messages.Fatal(f"{i}" * LARGE) for i in range(10)]
    for message in told:
        engine.send(message)  # and the client's loop is in this very thread
    waiting = asyncio.ensure_future(asyncio.to_thread(engine.receive, 30.0))
    assert [await client.receive() for _ in told] == told
    client.send(messages.FlushCache())
    assert await waiting == [messages.FlushCache()]


async def test_threads_may_tell_at_the_same_time(link):
    client, engine = link
    texts = [letter * LARGE for letter in "abcd"]
    telling = [asyncio.to_thread(engine.send, messages.Fatal(text)) for text in texts]
    sent = asyncio.gather(*telling, asyncio.to_thread(engine.receive, 30.0))
    received = [await client.receive() for _ in texts]
    assert sorted(message.error for message in received) == texts
    client.send(messages.FlushCache())
    await sent


async def test_the_last_words_of_an_engine_that_closes_are_heard():
    client, engine = await sockets()
    told = [messages.Fatal("a" * LARGE), messages.Stopped()]
    for message in told:
        engine.send(message)
    closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
    assert [await client.receive() for _ in told] == told
    await closing
    client.send(messages.FlushCache())  # to nobody
    await asyncio.sleep(0.01)
    client.close()


async def test_an_engine_whose_client_has_gone_waits_and_tells_nobody():
    client, engine = await sockets()
    client.close()
    await asyncio.sleep(0.01)
    engine.send(messages.Stopped())
    started, worked = time.monotonic(), time.process_time()
    assert engine.receive(0.3) == []
    assert time.monotonic() - started >= 0.3
    assert time.process_time() - worked < 0.2
    engine.send(messages.Stopped())
    engine.close()


async def test_a_request_arrives_as_it_was_sent(link):
    client, engine = link
    token_ids = array("i", [0, 128255, 2**31 - 1])
    sampling = TokenSampling(max_tokens=1, stop_token_ids=(3,))
    request = Request(request_id="r", token_ids=token_ids, sampling=sampling)
    client.send(messages.Submit(request))
    assert await asyncio.to_thread(engine.receive, 5.0) == [messages.Submit(request)]


async def test_what_cannot_be_sent_is_told_where_it_is_sent_and_keeps_nothing_else_back():
    client, engine = await sockets()
    client.send(messages.Abort(["before"]))
    with pytest.raises(TypeError, match="complex"):
        client.send(messages.Abort([1j]))  # pyright: ignore[reportArgumentType]
    client.send(messages.Abort(["after"]))
    await asyncio.sleep(0.05)
    assert engine.receive(5.0) == [messages.Abort(["before"]), messages.Abort(["after"])]
    client.close()
    engine.close()


class Number(enum.IntEnum):
    TWO = 2


class Derived(int):
    pass


class Text(str):
    pass


async def test_values_of_derived_classes_arrive_as_plain_ones():
    client, engine = await sockets()
    half = np.float64(0.5)
    sampling = TokenSampling(
        max_tokens=Number.TWO,
        temperature=half,
        logit_bias={Derived(3): half},
        stop_token_ids=(Derived(4), Number.TWO),
        seed=Derived(2**63),
    )
    request = Request(
        request_id=Text("a"), token_ids=array("i", [1]), sampling=sampling, cache_salt=Text("b")
    )
    client.send(messages.Submit(request))
    await asyncio.sleep(0.05)
    (message,) = engine.receive(5.0)
    assert message == messages.Submit(request)
    assert isinstance(message, messages.Submit)
    plain = message.request.sampling
    values = [plain.max_tokens, plain.seed, *plain.logit_bias, *plain.stop_token_ids]
    assert {type(value) for value in values} == {int}
    assert {type(plain.temperature), *map(type, plain.logit_bias.values())} == {float}
    assert {type(message.request.request_id), type(message.request.cache_salt)} == {str}
    client.close()
    engine.close()
