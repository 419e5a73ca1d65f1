"""What becomes of a program without a model: prompts, roles, forks, values, errors, streams."""

import asyncio
import concurrent.futures
import re
import threading
import time
import traceback

import httpx
import pytest

import jaxserve
from jaxserve import (
    InvalidRequest,
    ProgramCancelled,
    ProgramError,
    RequestFailed,
    assistant,
    function,
    gen,
    select,
    set_default_backend,
    system,
    user,
)
from jaxserve.lang import endpoint
from jaxserve.lang.interpreter import _groups
from jaxserve.types import EngineDead


def test_text_and_variables_grow_in_order(scripted):
    backend = scripted(lambda text: (f"<{len(text)}>", None))

    @function
    def program(s, word, *, end="!"):
        s += "Say " + gen("first") + f" {word}"
        s += gen()
        s += end
        return s["first"]

    state = program.run("twice", backend=backend, end="?")
    assert state.text() == "Say <4> twice<13>?"
    assert (state["first"], state.returned) == ("<4>", "<4>")
    assert "first" in state
    assert "second" not in state
    assert backend.texts == ["Say ", "Say <4> twice"]
    assert state.messages() == []
    with pytest.raises(KeyError, match="'second'; there are first"):
        state["second"]
    meta = state.get_meta("first")
    assert (meta["text"], meta["finish_reason"], meta["completion_tokens"]) == ("<4>", "stop", 3)


def test_a_prompt_begins_with_the_tokens_generated_before(scripted):
    backend = scripted(lambda text: (" the sky", None))

    @function
    def program(s):
        s += "Is"
        s += gen("a") + " blue"
        s += gen("b")

    program.run(backend=backend)
    first, second = backend.prompts
    # spelled letter by letter when generated, though " the" and " sky" are tokens
    spelled = [backend.tokenizer.encode(c, False)[0] for c in " the sky"]
    assert second == first + spelled + backend.tokenizer.encode(" blue", False)
    backend.joins = False
    program.run(backend=backend)
    assert backend.prompts[-1] == backend.tokenizer.encode("Is the sky blue")


def test_what_a_stop_string_cut_is_tokenized_with_what_follows(scripted):
    backend = scripted(lambda text: (" the", "\n"))

    @function
    def program(s):
        s += "Is" + gen("a", stop="\n") + " sky" + gen("b")

    state = program.run(backend=backend)
    assert state.get_meta("a")["stop_reason"] == "\n"
    first, second = backend.prompts
    assert second == first + backend.tokenizer.encode(" the sky", False)


def test_roles_are_the_templates(scripted):
    backend = scripted(lambda text: ("fine", None))

    @function
    def program(s):
        s += system("Be brief.")
        with s.user():
            s += "How "
            s += "are you?"
        with s.assistant():
            s += "I am "
            s += gen("mood")
        s += user("And now?") + assistant(gen("now"))

    state = program.run(backend=backend)
    turn = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "I am fine"},
        {"role": "user", "content": "And now?"},
    ]
    render = backend.chat_template.render
    assert state.messages() == [*turn, {"role": "assistant", "content": "fine"}]
    assert backend.texts == [render(turn[:2]) + "I am ", render(turn)]
    assert state.text() == render(state.messages(), add_generation_prompt=False)
    first, second = backend.prompts
    assert second[: len(first)] == first


def test_a_template_that_rewrites_what_was_said_has_its_way(scripted):
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.content | trim }};{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    backend = scripted(lambda text: (" well ", None), template=template)

    @function
    def program(s):
        for _ in range(2):
            s += user("hi") + assistant(gen())

    state = program.run(backend=backend)
    assert backend.texts[1] == "user=hi;assistant=well;user=hi;assistant="
    assert state.text() == "user=hi;assistant=well;" * 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda s: s.__iadd__(user("a") + "b"), "once a program has used one"),
        (lambda s: s.__iadd__("a" + user("b")), "after text that stands in no role"),
        (lambda s: s.__iadd__(user(assistant("b"))), r"assistant\(\) stands in user\(\)"),
        (lambda s: s.__iadd__(user("a" + gen("x"))), r"gen\('x'\) stands in user\(\)"),
        (lambda s: s.__iadd__(gen("x", dtype=int)), "brought 'ok', which is no int"),
        (lambda s: s.__iadd__(select("x", ["a"])), "needs text before it"),
    ],
)
def test_programs_that_make_no_sense(scripted, program, message):
    with pytest.raises(ProgramError, match=message):
        function(program).run(backend=scripted())


def test_what_is_no_program():
    async def waits(s):
        s += "a"

    def yields(s):
        yield s

    for body in (waits, yields):
        with pytest.raises(TypeError, match="is async or a generator"):
            function(body)
    with pytest.raises(TypeError, match="takes no state"):
        function(lambda: None)


def test_an_expression_stands_in_no_f_string(scripted):
    for expression, text in (
        (gen("x"), "gen('x')"),
        (select("x", ["a", "b"]), "select('x')"),
        (user("a"), "user(...)"),
        ("a" + gen("x"), "'a' + gen('x')"),
    ):
        message = re.escape(f'{text} stands in an f-string; join by +: "..." + {text}')
        with pytest.raises(ProgramError, match=message):
            function(lambda s, one=expression: s.__iadd__(f"Name: {one}")).run(backend=scripted())


def test_what_is_no_text_is_not_appended(scripted):
    with pytest.raises(TypeError, match="int can't be appended"):
        function(lambda s: s.__iadd__(5)).run(backend=scripted())
    with pytest.raises(TypeError, match="a int can't be joined"):
        gen("x") + 5


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"regex": "a", "dtype": int}, "dtype"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"dtype": list}, "dtype"),
        ({"json_schema": "{"}, "json_schema"),
        ({"choices": []}, "choices"),
        ({"choices": ["a", "a"]}, "choices"),
        ({"choices": "ab"}, "choices"),
        ({"choices": 5}, "choices"),
        ({"choices": ["a"], "max_tokens": 5}, "max_tokens"),
        ({"name": 5}, "name"),
    ],
)
def test_what_gen_refuses_by_name(arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        gen(**arguments)
    assert caught.value.field == field


def test_sampling_for_all_gens_of_a_run(scripted):
    backend = scripted()

    @function
    def program(s, seed):
        s += "a" + gen(max_tokens=3, stop=[".", ";"]) + gen(temperature=0.5)

    program.run(7, backend=backend, temperature=0, top_k=4)
    program.run(seed=7, backend=backend)
    found = [(p.temperature, p.top_k, p.max_tokens, p.stop, p.seed) for p in backend.params]
    assert found == [
        (0, 4, 3, (".", ";"), None),
        (0.5, 4, None, (), None),
        (None, None, 3, (".", ";"), None),
        (0.5, None, None, (), None),
    ]
    with pytest.raises(TypeError, match="max_new is neither"):
        program.run(1, backend=backend, max_new=4)
    with pytest.raises(InvalidRequest, match="n: can't be given in a program"):
        program.run(1, backend=backend, n=4)
    with pytest.raises(InvalidRequest, match="top_p"):
        program.run_batch([{"seed": 1}], backend=backend, top_p=4)
    with pytest.raises(TypeError, match="seeds is neither"):
        program.run_batch([{"seed": 1}], backend=backend, seeds=4)


@pytest.mark.parametrize(
    ("dtype", "text", "value", "kept"),
    [
        (int, "42", 42, "42"),
        (int, " -7", -7, " -7"),
        (float, "2.5", 2.5, "2.5"),
        (float, " 3.", 3.0, " 3"),
        (float, "-12", -12.0, "-12"),
        (bool, "True", True, "True"),
        (bool, " false", False, " false"),
        (str, " a ", " a ", " a "),
    ],
)
def test_values_of_a_type(scripted, dtype, text, value, kept):
    state = function(lambda s: s.__iadd__("x" + gen("v", dtype=dtype))).run(
        backend=scripted(lambda _: (text, None))
    )
    assert (state["v"], type(state["v"]), state.text()) == (value, dtype, "x" + kept)


def test_a_type_keeps_the_stops_that_were_given(scripted):
    backend = scripted(lambda _: ("1", None))
    function(lambda s: s.__iadd__("x" + gen(dtype=int, stop_regex="a+"))).run(backend=backend)
    assert len(backend.params[0].stop_regex) == 2


def test_forks_of_forks_join_as_lists_of_lists(scripted):
    backend = scripted(lambda text: (text[-1].upper(), None))

    @function
    def program(s):
        s += "a"
        with s.fork(2) as forks:
            for i, fork in enumerate(forks):
                with fork.fork(2) as inner:
                    for j, leaf in enumerate(inner):
                        leaf += "wxyz"[2 * i + j] + gen("letter")
        return s["letter"]

    state = program.run(backend=backend)
    assert state.returned == state["letter"] == [["W", "X"], ["Y", "Z"]]
    assert len(state.get_meta("letter")[1]) == 2


def test_forks_go_on_by_themselves_and_join(scripted):
    backend = scripted(lambda text: (text[-1].upper(), None))

    @function
    def program(s):
        s += "ab" + gen("own")
        with s.fork(3) as forks:
            forks += "-"
            for i, fork in enumerate(forks):
                fork += "xyz"[i] + gen("letter")
            forks[1] += gen("other")
        s += "+" + gen("last")
        return forks

    state = program.run(backend=backend)
    assert [fork.text() for fork in state.returned] == ["abB-xX", "abB-yYY", "abB-zZ"]
    assert state["letter"] == ["X", "Y", "Z"]
    assert state["other"] == [None, "Y", None]
    assert [meta["text"] for meta in state.get_meta("letter")] == ["X", "Y", "Z"]
    assert (state["own"], state.text()) == ("B", "abB++")
    for count in (0, "a", 2.0):
        with pytest.raises(ValueError, match=f"count is {count!r}; allowed: 1 or more"):
            state.fork(count)
    with pytest.raises(TypeError, match="can't be replaced"):
        state.returned[0] = state


def test_a_program_within_a_program(scripted):
    @function
    def inner(s, word):
        s += word + gen("w")

    @function
    def outer(s):
        inner(s, "a")
        inner(s, word="b")

    assert outer.run(backend=scripted()).text() == "aokbok"


def fail_on(word):
    def answer(text):
        if text.endswith(word):
            raise RequestFailed("the engine gave up")
        return "ok", None

    return answer


def test_an_error_surfaces_at_run_with_its_place(scripted):
    @function
    def program(s):
        s += "good" + gen("a")
        s += "bad" + gen("b")
        s += gen("c")

    with pytest.raises(RequestFailed, match="the engine gave up") as caught:
        program.run(backend=scripted(fail_on("bad")))
    [note] = caught.value.__notes__
    line = program._body.__code__.co_firstlineno + 3
    assert note == f"in the program: gen('b') at {__file__}:{line}, in program"


def test_an_error_is_raised_where_it_is_read_and_may_be_caught(scripted):
    backend = scripted(fail_on("bad"))

    @function
    def careful(s):
        fork = s.fork()[0]
        fork += "bad" + gen("a")
        fork += gen("b")
        with pytest.raises(RequestFailed):
            _ = fork["b"]
        s += "good" + gen("a")

    assert careful.run(backend=backend)["a"] == "ok"

    @function
    def careless(s):
        s += "bad" + gen("a")
        return s["a"].upper()

    with pytest.raises(RequestFailed) as caught:
        careless.run(backend=backend)
    assert "in careless" in "".join(traceback.format_exception(caught.value))


def test_a_programs_own_error_ends_its_requests(scripted):
    started, ended = threading.Event(), threading.Event()
    backend = scripted()

    async def endless(token_ids, params, on_text):
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    backend.generate = endless

    @function
    def program(s):
        s += "a" + gen("a")
        started.wait(5)
        raise LookupError("of the program")

    with pytest.raises(LookupError, match="of the program"):
        program.run(backend=backend)
    assert ended.wait(5)


def test_the_first_error_of_a_batch_cancels_the_rest(scripted):
    backend = scripted()
    begun, ended = threading.Event(), threading.Event()

    async def generate(token_ids, params, on_text):
        if backend.tokenizer.decode(token_ids) == "2":
            while not begun.is_set():
                await asyncio.sleep(0.001)
            raise RequestFailed("the second")
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    backend.generate = generate
    program = function(lambda s, i: s.__iadd__(str(i) + gen("x")))
    started = time.monotonic()
    with pytest.raises(RequestFailed, match="the second"):
        program.run_batch([{"i": i} for i in range(8)], backend=backend, num_threads=4)
    assert time.monotonic() - started < 30
    assert ended.wait(5)


def test_a_batch_keeps_order_and_shows_a_bar(scripted, capfd):
    program = function(lambda s, i: s.__iadd__(str(i) + gen("x")))
    backend = scripted(lambda text: (text + "!", None))
    items = [{"i": i} for i in range(30)]
    states = program.run_batch(items, backend=backend, num_threads=7, progress_bar=True)
    assert [state["x"] for state in states] == [f"{i}!" for i in range(30)]
    out, err = capfd.readouterr()
    assert out == ""
    assert "30/30" in err
    assert "tokens/s" in err
    made = program.run_batch(({"i": i} for i in range(3)), backend=backend)
    assert [state["x"] for state in made] == ["0!", "1!", "2!"]
    assert program.run_batch([], backend=backend) == []
    for items in ({"i": 3}, [{"i": 1}, "i"]):
        with pytest.raises(TypeError, match=r"item \d is a str; allowed: arguments by name"):
            program.run_batch(items, backend=backend)
    with pytest.raises(ValueError, match="num_threads is 0"):
        program.run_batch(items, backend=backend, num_threads=0)


async def test_a_variable_streams_while_the_program_runs(scripted):
    backend = scripted(lambda text: ("17" if text.endswith("=") else f"after {text}", None))
    go_on = threading.Event()

    @function
    def program(s):
        s += "a" + gen("first")
        assert go_on.wait(5)
        s += "b" + gen("second") + "=" + gen("number", dtype=int)

    state = program.run(backend=backend, stream=True)
    assert list(state.text_iter("first")) == list("after a"), "before the program goes on"
    go_on.set()
    assert [piece async for piece in state.text_async_iter("second")] == list("after aafter ab")
    assert state["number"] == 17
    assert list(state.text_iter("number")) == ["17"], "a value comes whole"
    assert state.wait() is state
    assert list(state.text_iter("first")) == list("after a"), "again"
    with pytest.raises(KeyError):
        state.text_iter("third")
    whole = program.run(backend=backend)
    assert list(whole.text_iter("first")) == ["after a"], "where nothing is streamed: all at once"


def test_a_streamed_programs_error_is_told_to_whoever_reads(scripted):
    @function
    def program(s):
        s += "a" + gen("first")
        raise LookupError("of the program")

    state = program.run(backend=scripted(), stream=True)
    for read in (state.wait, lambda: state["second"], lambda: state.text_iter("second")):
        with pytest.raises(LookupError, match="of the program") as caught:
            read()
    assert "in program" in "".join(traceback.format_exception(caught.value))
    failed = function(lambda s: s.__iadd__("bad" + gen("x")))
    state = failed.run(backend=scripted(fail_on("bad")), stream=True)
    with pytest.raises(RequestFailed):
        list(state.text_iter("x"))
    with pytest.raises(RequestFailed):
        state.wait()


def test_a_select_takes_the_best_per_token_in_one_call(scripted):
    """Ids as log-probabilities: each choice's score is minus the mean of its tokens' ids."""
    backend = scripted()
    encode = backend.tokenizer.encode
    choices = [" red", " green blue", " the", "x"]
    state = function(lambda s: s.__iadd__("It is" + select("c", choices) + gen("rest"))).run(
        backend=backend
    )
    expected = []
    for choice in choices:
        ids = encode("It is" + choice)[len(encode("It is")) :]
        expected.append(-sum(ids) / len(ids))
    meta = state.get_meta("c")
    assert meta["scores"] == pytest.approx(expected)
    assert meta["num_tokens"] == [1, 2, 1, 1]
    assert state["c"] == choices[expected.index(max(expected))]
    # single tokens are all scored after the prompt itself
    whole, longer, after = backend.prompts
    assert [whole, longer] == [encode("It is"), encode("It is green")]
    assert after == encode("It is" + state["c"])


def test_choices_with_more_last_tokens_than_may_be_named_are_scored_in_groups():
    endings = [[1, i % 200] for i in range(300)]
    groups = _groups(endings)
    assert [i for group in groups for i in group] == list(range(300))
    assert all(len({endings[i][-1] for i in group}) <= 128 for group in groups)
    assert len(groups) == 3


def test_a_default_backend(scripted):
    program = function(lambda s: s.__iadd__("a" + gen("x")))
    with pytest.raises(ValueError, match="there is no backend"):
        program.run()
    set_default_backend(scripted())
    try:
        assert program.run()["x"] == "ok"
        assert program.run(backend=scripted(lambda _: ("mine", None)))["x"] == "mine"
    finally:
        set_default_backend(None)
    for use in (set_default_backend, lambda name: program.run(backend=name)):
        with pytest.raises(TypeError, match=r"backend is a str; allowed: Runtime\(model\)"):
            use("smollm2-135m-instruct")


def test_a_cancelled_program_ends(scripted):
    backend = scripted()
    ended = threading.Event()

    async def endless(token_ids, params, on_text):
        on_text("piece")
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    backend.generate = endless

    @function
    def program(s):
        s += "a" + gen("x") + gen("y")
        s["y"]

    state = program.run(backend=backend, stream=True)
    assert next(state.text_iter("x")) == "piece"
    state.cancel()
    assert ended.wait(5)
    for read in (state.wait, lambda: state["x"], state.text, lambda: state.fork()[0].sync()):
        with pytest.raises(ProgramCancelled):
            read()
    with pytest.raises(ProgramCancelled):
        state += gen("z")


@pytest.mark.parametrize("how", ["read", "iterate", "sync", "text", "append", "another thread"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_cancel_that_the_program_caught_is_not_raised_again(scripted, how, stream):
    backend = scripted()

    async def endless(token_ids, params, on_text):
        await asyncio.sleep(60)

    def read(s):
        match how:
            case "iterate":
                list(s.text_iter("x"))
            case "sync":
                s.sync()
            case "text":
                s.text()
            case "append":
                s += gen("z")
            case _:
                _ = s["x"]

    @function
    def program(s):
        s += "a" + gen("x") + gen("y")
        forks = s.fork(2)
        forks += gen("x")
        s.cancel()
        with pytest.raises(ProgramCancelled):
            read(s)
        return "done"

    @function
    def aside(s):
        s += "a" + gen("x") + gen("y")
        s.cancel()
        with (
            concurrent.futures.ThreadPoolExecutor(1) as threads,
            pytest.raises(ProgramCancelled),
        ):
            threads.submit(read, s).result()
        return "done"

    backend.generate = endless
    if how == "another thread":
        assert aside.run(backend=backend).returned == "done"
        return
    if stream:
        assert program.run(backend=backend, stream=True).wait().returned == "done"
        return
    states = program.run_batch([{}, {}], backend=backend, progress_bar=True)
    assert [state.returned for state in states] == ["done"] * 2


def test_a_cancel_that_only_others_heard_of_is_raised(scripted):
    backend = scripted()
    begun, read = threading.Event(), threading.Event()

    async def endless(token_ids, params, on_text):
        begun.set()
        await asyncio.sleep(60)

    @function
    def program(s):
        s += "a" + gen("x")
        read.wait(5)

    backend.generate = endless
    state = program.run(backend=backend, stream=True)
    assert begun.wait(5)
    state.cancel()
    with pytest.raises(ProgramCancelled):
        state["x"]
    read.set()
    with pytest.raises(ProgramCancelled):
        state.wait()


def test_an_error_caught_while_iterating_is_not_raised_again(scripted):
    @function
    def program(s):
        s += "bad" + gen("a") + gen("b")
        with pytest.raises(RequestFailed):
            list(s.text_iter("b"))

    program.run(backend=scripted(fail_on("bad")))


def test_a_closed_backend_ends_its_programs(scripted):
    backend = scripted()
    begun = threading.Event()

    async def endless(token_ids, params, on_text):
        begun.set()
        await asyncio.sleep(60)

    backend.generate = endless
    program = function(lambda s: s.__iadd__("a" + gen("x")))
    state = program.run(backend=backend, stream=True)
    assert begun.wait(5)
    backend.close()
    with pytest.raises(ProgramCancelled):
        state.wait()
    with pytest.raises(jaxserve.EngineDead):
        program.run(backend=backend)


@pytest.mark.parametrize(
    ("code", "error"), [("request_aborted", RequestFailed), ("engine_unavailable", EngineDead)]
)
def test_a_server_whose_request_was_aborted_is_not_dead(code, error):
    body = {"error": {"message": "why", "code": code}}
    asked = httpx.Request("POST", "http://server/generate")
    with pytest.raises(error, match="why"):
        endpoint._check(httpx.Response(503, json=body, request=asked))
