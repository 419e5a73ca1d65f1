"""The link between entry and engine."""

import asyncio
import threading

import pytest

from jaxserve import messages


@pytest.fixture(params=["queue", "zmq"])
async def link(request, tmp_path):
    if request.param == "queue":
        engine = messages.QueueEngineEnd()
        client = engine.connect()
    else:
        address = f"ipc://{tmp_path}/link"
        client = messages.ZmqClientEnd(address)
        engine = messages.ZmqEngineEnd(address)
    yield client, engine
    client.close()
    engine.close()


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
