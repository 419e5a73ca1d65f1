"""The Python API over a scripted engine: same verbs, threads that end, streams that abort."""

import asyncio
import gc
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import jaxserve
from jaxserve import LLM, AsyncLLM, EngineConfig, EngineDead, InvalidRequest, SamplingParams
from jaxserve.entry.llm import make_config
from jaxserve.types import ConfigError, TokenOutput


@pytest.fixture
def client_threads():
    """Those that this test began and that run still: engines of other files have theirs."""

    def running():
        return {t for t in threading.enumerate() if t.name == "jaxserve-client"}

    before = running()
    return lambda: running() - before


@pytest.fixture
def connect(client_threads):
    llms = []

    def make(engine, kind=LLM, **settings):
        llm = kind(
            "tiny", start_engine=engine.start_engine, load_model=engine.load_model, **settings
        )
        if kind is LLM:
            llms.append(llm)
        return llm

    yield make
    for llm in llms:
        llm.close()
    assert not client_threads()


def eventually(condition):
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def endless(request):
    while True:
        yield TokenOutput(request_id=request.request_id, token_ids=[65])
        time.sleep(0.001)


def test_verbs_give_what_the_engine_says(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level)
    llm = connect(engine)
    results = llm.generate(["The", "dog"], SamplingParams(temperature=0))
    assert [result.text for result in results] == [engine.answer] * 2
    assert results[0].finish_reason == "stop"
    assert results[0].usage.cached_tokens == 0
    assert llm.generate([1, 2, 3])[0].prompt_token_ids == [1, 2, 3]
    assert len(llm.generate([[1], [2, 3]])) == 2
    conversation = [{"role": "user", "content": "hi"}]
    assert llm.chat(conversation)[0].text == engine.answer
    assert len(llm.chat([conversation] * 2, progress=True)) == 2
    assert "".join(str(delta) for delta in llm.stream("The")) == engine.answer
    assert "".join(str(delta) for delta in llm.chat_stream(conversation)) == engine.answer
    assert llm.detokenize(llm.tokenize("dog")) == "dog"
    assert llm.info.model == "tiny"
    assert llm.stats().num_steps == 1
    llm.flush_cache()
    llm.health()


def test_progress_bar_goes_to_standard_error(fake_engine, byte_level, connect, capfd):
    llm = connect(fake_engine(byte_level))
    llm.generate(["x"] * 3, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "tokens/s" in err


def test_mistakes_raise_where_they_are_made(fake_engine, byte_level, connect):
    llm = connect(fake_engine(byte_level))
    with pytest.raises(InvalidRequest):
        llm.generate("")
    with pytest.raises(InvalidRequest):
        llm.stream("")  # at the call, not at the first delta
    with pytest.raises(InvalidRequest):
        llm.chat([])


@pytest.mark.parametrize("how", ["close", "break", "never begun", "cycle"])
def test_stream_that_is_left_aborts(fake_engine, byte_level, connect, how):
    engine = fake_engine(byte_level, script=endless)
    llm = connect(engine)
    stream = llm.stream("x")
    if how == "close":
        next(stream)
        stream.close()
    elif how == "break":
        for _ in stream:
            break
        del stream
    elif how == "never begun":
        del stream
    else:
        next(stream)
        holder = [stream]
        holder.append(holder)
        del stream, holder
        gc.collect()
    eventually(lambda: engine.aborted)
    assert engine.aborted == [engine.requests[0].request_id]


def test_interrupted_call_aborts(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level, script=endless)
    llm = connect(engine)

    def interrupt():
        eventually(lambda: len(engine.requests) == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"])
    thread.join()
    eventually(lambda: len(engine.aborted) == 2)
    assert len(llm.tokenize("x")) == 1


def test_abort_from_another_thread(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level, script=endless)
    llm = connect(engine)
    deltas = []
    for delta in llm.stream("x", request_id="mine"):
        if not deltas:
            thread = threading.Thread(target=llm.abort, args=("mine",))
            thread.start()
        deltas.append(delta)
    thread.join()
    assert deltas[-1].finish_reason == "abort"


def test_several_threads_share_one_llm(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level)
    llm = connect(engine)
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate("x")[0].text)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [engine.answer] * 8


def test_close_ends_streams_and_calls(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level, script=endless)
    llm = connect(engine)
    stream = llm.stream("x")
    next(stream)
    errors = []

    def wait():
        try:
            llm.generate("y")
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(engine.requests) == 2)
    llm.close()
    llm.close()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(EngineDead):
        list(stream)
    for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.tokenize("x")):
        with pytest.raises(EngineDead, match="closed"):
            call()


def test_losing_the_last_reference_ends_the_engine(fake_engine, byte_level, client_threads):
    engine = fake_engine(byte_level)
    llm = LLM("tiny", start_engine=engine.start_engine, load_model=engine.load_model)
    assert llm.generate("x")
    del llm
    gc.collect()
    eventually(lambda: not engine.threads[0].is_alive())
    eventually(lambda: not client_threads())


def test_last_reference_may_go_in_the_clients_own_thread(fake_engine, byte_level):
    engine = fake_engine(byte_level)
    llms = [LLM("tiny", start_engine=engine.start_engine, load_model=engine.load_model)]
    loop = llms[0]._loop

    async def lose():
        llms.clear()
        gc.collect()

    loop.run(lose())
    eventually(lambda: not engine.threads[0].is_alive())
    eventually(lambda: not loop.thread.is_alive())


def test_failed_start_leaves_no_thread(fake_engine, client_threads):
    from jaxserve import messages

    engine = fake_engine(start_messages=[messages.Fatal("ConfigError: tensor", "ConfigError")])
    with pytest.raises(ConfigError, match="tensor"):
        LLM("tiny", start_engine=engine.start_engine, load_model=engine.load_model)
    assert not client_threads()


def test_program_that_forgets_to_close_ends(tmp_path):
    """In a process of its own: the end of the program ends the engine, in order."""
    script = tmp_path / "forgets.py"
    script.write_text(
        "import importlib.util, sys\n"
        f"path = {str(pathlib.Path(__file__).parent / 'conftest.py')!r}\n"
        "spec = importlib.util.spec_from_file_location('fakes', path)\n"
        "fakes = importlib.util.module_from_spec(spec); sys.modules['fakes'] = fakes\n"
        "spec.loader.exec_module(fakes)\n"
        "from jaxserve import LLM\n"
        "engine = fakes.FakeEngine(fakes.make_byte_level())\n"
        "llm = LLM('tiny', start_engine=engine.start_engine, load_model=engine.load_model)\n"
        "stream = llm.stream('x')\n"
        "print(next(stream).request_id != '')\n"
        "import atexit; atexit.register(lambda: print('shutdowns', len(engine.shutdowns)))\n"
        "other = fakes.FakeEngine(engine.tokenizer)\n"
        "llm2 = LLM('tiny', start_engine=other.start_engine, load_model=other.load_model)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.split() == ["True", "shutdowns", "0"]  # ran first: the engine still lives


def test_calls_from_the_clients_own_thread_are_refused(fake_engine, byte_level, connect):
    llm = connect(fake_engine(byte_level))

    async def wrong():
        llm.generate("x")

    with pytest.raises(RuntimeError, match="AsyncLLM"):
        llm._loop.run(wrong())


async def test_async_llm_has_the_same_verbs(fake_engine, byte_level, connect):
    engine = fake_engine(byte_level)
    llm = connect(engine, AsyncLLM, tensor=2)  # made without `start`
    assert llm.config.mesh.tensor == 2
    results = await asyncio.gather(llm.generate("x"), llm.generate("y"))
    assert [result[0].text for result in results] == [engine.answer] * 2
    assert "".join([str(delta) async for delta in llm.stream("x")]) == engine.answer
    await llm.close()
    async with connect(fake_engine(byte_level), AsyncLLM) as llm:
        assert (await llm.generate("x"))[0].text == engine.answer


def test_settings_are_flat_and_checked():
    config = make_config("m", {"tensor": 2, "max_num_seqs": 8})
    assert (config.model, config.mesh.tensor, config.max_num_seqs) == ("m", 2, 8)
    assert make_config(None, {}).model == EngineConfig().model
    assert make_config(config, {}) is config
    for model, fields, name in [
        ("m", {"max_seqs": 1}, "max_seqs"),
        ("m", {"page_size": 3}, "page_size"),
        ("m", {"tensor": 2, "mesh": config.mesh}, "mesh"),
        (config, {"tensor": 2}, "tensor"),
    ]:
        with pytest.raises(ConfigError, match=name):
            make_config(model, fields)
    with pytest.raises(ConfigError, match="process"):
        AsyncLLM("m", process="fork")


def test_package_names_everything_lazily():
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name) is not None
    assert set(jaxserve.__all__) <= set(dir(jaxserve))
    with pytest.raises(AttributeError, match="nothing"):
        getattr(jaxserve, "nothing")  # noqa: B009
