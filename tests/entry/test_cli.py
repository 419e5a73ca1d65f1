"""The command line: flags out of fields, commands over a fake engine, errors as one line."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import click.testing
import pytest
from server_fakes import REPLY, FakeEngine, byte_tokenizer, fake_info

from jaxserve.config import EngineConfig, MeshConfig, ServerConfig
from jaxserve.entry import cli, llm, progress
from jaxserve.entry.client import TextModel
from jaxserve.messages import Progress
from jaxserve.types import CheckpointError, EngineDead, SamplingParams


class Fakes:
    """The LLMs that a command made, over fake engines."""

    def __init__(self):
        self.configs: list[EngineConfig] = []
        self.engines: list[FakeEngine] = []
        self.ends = False

    def start_llm(self, config: EngineConfig) -> llm.LLM:
        tokenizer = byte_tokenizer()
        self.configs.append(config)

        async def start_engine(config: EngineConfig, process: Any) -> FakeEngine:
            engine = FakeEngine(tokenizer, fake_info())
            engine.ends = self.ends
            self.engines.append(engine)
            return engine

        def load_model(name: str) -> TextModel:
            return TextModel("tiny", tokenizer, SamplingParams(), frozenset({257}))

        return llm.LLM(config, start_engine=start_engine, load_model=load_model)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    monkeypatch.setattr(cli, "start_llm", fakes.start_llm)
    return fakes


def run(*arguments: str, input: str | None = None) -> click.testing.Result:
    result = click.testing.CliRunner().invoke(cli.cli, arguments, input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxserve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- flags


def options(name: str) -> dict[str, click.Option]:
    parameters = cli.cli.commands[name].params
    return {o: p for p in parameters if isinstance(p, click.Option) for o in p.opts}


def test_every_setting_is_a_flag_with_help():
    names = {f.name for kind in (EngineConfig, MeshConfig) for f in dataclasses.fields(kind)}
    names -= {"model", "mesh"}
    for name in ("serve", "generate", "chat"):
        flags = options(name)
        for field in names:
            flag = flags[f"--{field.replace('_', '-')}"]
            assert flag.help
    for field in dataclasses.fields(ServerConfig):
        assert options("serve")[f"--{field.name.replace('_', '-')}"].help


def test_every_sampling_parameter_is_a_flag_with_help():
    for name in ("generate", "chat"):
        for field in SamplingParams.__struct_fields__:
            help = options(name)[f"--{field.replace('_', '-')}"].help
            assert help
            assert "<" not in help, "a default that is no value"


def test_flags_become_a_config(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    from jaxserve.entry import serve

    monkeypatch.setattr(serve, "serve", lambda *configs: seen.extend(configs) or 0)
    result = run(
        "serve", "m", "--tensor", "2", "--no-overlap", "--dtype", "bfloat16", "--port", "0",
        "--grpc-port", "0", "--restart-engine", "--memory-fraction", "0.5", "--weights-seed", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert seen == [
        EngineConfig(
            model="m", mesh=MeshConfig(tensor=2), overlap=False, dtype="bfloat16",
            memory_fraction=0.5, weights_seed=3,
        ),
        ServerConfig(port=0, grpc_port=0, restart_engine=True),
    ]  # fmt: skip


def test_flags_left_out_take_the_defaults(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    from jaxserve.entry import serve

    monkeypatch.setattr(serve, "serve", lambda *configs: seen.extend(configs) or 7)
    assert run("serve", "m").exit_code == 7
    assert seen == [EngineConfig(model="m"), ServerConfig()]


@pytest.mark.parametrize("is_long", [False, True])
def test_a_start_that_takes_long_is_told_on_standard_error(monkeypatch, capsys, is_long):
    def start(config: EngineConfig, process: str, on_progress: Any) -> str:
        on_progress(Progress("compile", "decode 8", 1, 2))
        return "started"

    monkeypatch.setattr(llm, "LLM", start)
    if is_long:
        monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    assert cli.start_llm(EngineConfig(model="m")) == "started"
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "compile   1/2 decode 8\n" if is_long else "")


# ---- generate


def test_generate_prints_the_text(fakes: Fakes):
    result = run("generate", "m", "--prompt", "a", "--max-tokens", "5", "--temperature", "0")
    assert result.stdout == "Hello\n"
    (request,) = fakes.engines[0].requests
    assert request.sampling.temperature == 0
    assert fakes.configs == [EngineConfig(model="m")]


def test_token_options_are_flags(fakes: Fakes):
    flags = "--logit-bias 7=-1.5 --logit-bias 8=2 --allowed-token-ids 3 --bad-words ab"
    run("generate", "m", "--prompt", "a", *flags.split(), "--presence-penalty", "1")
    (request,) = fakes.engines[0].requests
    assert request.sampling.logit_bias == {7: -1.5, 8: 2.0}
    assert request.sampling.allowed_token_ids == (3,)
    assert len(request.sampling.bad_words) == 2
    wrong = run("generate", "m", "--prompt", "a", "--logit-bias", "x=1")
    assert wrong.exit_code == 2
    assert "'x=1' is not ID=NUMBER" in wrong.stderr


def test_generate_json_is_the_whole_result(fakes: Fakes):
    result = run("generate", "m", "--prompt", "a", "--prompt", "bc", "--max-tokens", "5", "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("a", "bc")
    assert first["choices"][0]["text"] == "Hello"
    assert first["choices"][0]["finish_reason"] == "length"
    assert len(first["choices"][0]["token_ids"]) == 5
    assert second["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "cached_tokens": 0}
    assert len(second["prompt_token_ids"]) == 2


def test_generate_tells_several_results_apart(fakes: Fakes):
    result = run("generate", "m", "--prompt", "a", "--max-tokens", "5", "--n", "2")
    assert result.stdout == "--- a #0\nHello\n--- a #1\nHello\n"


def test_generate_from_a_file_with_a_bar(fakes: Fakes, tmp_path: pathlib.Path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nwörld\n")
    result = run("generate", "m", "--prompt-file", str(path), "--max-tokens", "5")
    assert result.stdout == "--- one\nHello\n--- two\nHello\n--- wörld\nHello\n"
    assert "tokens/s" in result.stderr
    assert "3/3" in result.stderr


@pytest.mark.parametrize("text", [b"", b"a\n\nb\n", b"a\n\xff\n"])
def test_generate_refuses_files_that_are_no_prompts(fakes, tmp_path: pathlib.Path, text: bytes):
    path = tmp_path / "prompts.txt"
    path.write_bytes(text)
    result = run("generate", "m", "--prompt-file", str(path))
    assert result.exit_code == 2
    assert "--prompt-file" in result.stderr
    assert fakes.engines == []


# ---- chat


def test_chat_keeps_history_until_reset(fakes: Fakes):
    fakes.ends = True
    result = run("chat", "m", "--system", "s", input="hi\nagain\n/reset\nnew\n/exit\nnever\n")
    assert result.stdout == f"{REPLY}\n" * 3
    tokenizer = byte_tokenizer()
    prompts = [tokenizer.decode(request.token_ids) for request in fakes.engines[0].requests]
    assert prompts == [
        "<system>s\n<user>hi\n<assistant>",
        f"<system>s\n<user>hi\n<assistant>{REPLY}\n<user>again\n<assistant>",
        "<system>s\n<user>new\n<assistant>",
    ]


def test_chat_ends_with_its_input_and_goes_on_after_errors(fakes: Fakes):
    fakes.ends = True
    result = run("chat", "m", input=f"{'a' * 300}\n\n/what\nhi\n")
    assert result.exit_code == 0
    assert result.stdout == f"{REPLY}\n"
    assert "300" in result.stderr or "context" in result.stderr
    assert "/what" in result.stderr


def test_chat_ctrl_c_stops_the_answer_only(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    fakes.ends = True
    llm = fakes.start_llm(EngineConfig(model="m"))
    with llm:
        fakes.engines[0].step_s = 0.02

        def interrupted(text: str = "", **options: Any) -> None:
            if "w" in text:
                monkeypatch.undo()
                raise KeyboardInterrupt

        monkeypatch.setattr(cli.click, "echo", interrupted)
        history = cli.answer(llm, [{"role": "user", "content": "a"}], SamplingParams())
        assert history is not None
        assert history[-1] == {"role": "assistant", "content": "Hello, w"}
        fakes.engines[0].step_s = 0
        (output,) = llm.generate("a", SamplingParams(max_tokens=5))
        assert output.text == "Hello"
        assert not fakes.engines[0].running


# ---- errors and the process


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "m"], "--prompt"),
        (["generate", "m", "--prompt", "a", "--temperature", "5"], "temperature"),
        (["generate", "m", "--prompt", "a", "--top-k", "x"], "--top-k"),
        (["generate", "m", "--prompt", "a", "--n", "0"], "n: "),
        (["generate", "m", "--prompt", "a", "--tensor", "0"], "tensor"),
        (["generate", "m", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["chat", "m", "--n", "2"], "--n"),
        (["serve", "m", "--page-size", "7"], "page_size"),
        (["serve", "m", "--dtype", "int3"], "--dtype"),
        (["serve", "m", "--no-such-flag"], "--no-such-flag"),
        (["serve"], "MODEL"),
        (["nothing"], "nothing"),
        (["pull", "no-such-model"], "no-such-model"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["jaxserve", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("jaxserve: ")
    assert errors.count("\n") == 1
    assert words in errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("m: shard 2 is missing"), 2),
        (EngineDead("the engine ended"), 1),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_of_a_run(error, code: int, monkeypatch, capsys: pytest.CaptureFixture[str]):
    def fail(config: EngineConfig) -> None:
        raise error

    monkeypatch.setattr(cli, "start_llm", fail)
    monkeypatch.setattr(sys, "argv", ["jaxserve", "generate", "m", "--prompt", "a"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert str(error) in capsys.readouterr().err


def test_the_command_is_quick_and_imports_nothing_heavy():
    result = command("--version")
    assert (result.returncode, result.stdout) == (0, "jaxserve, version 0.1.0\n")
    code = (
        "import sys, jaxserve.entry.cli\n"
        "heavy = {'jax', 'numpy', 'fastapi', 'grpc', 'uvicorn', 'tokenizers', 'rich', 'uvloop'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_of_each_command():
    for name in cli.cli.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert len(result.stdout.splitlines()) > 4
    assert command().returncode == 2
