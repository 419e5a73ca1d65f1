"""The `jaxserve` command. Imports nothing heavy until a command runs; no jax but in `convert`.

Flags are made from the fields of EngineConfig, MeshConfig, ServerConfig and SamplingParams, with
their help texts. Engines run in processes of their own.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from jaxserve import __version__
from jaxserve.config import EngineConfig, MeshConfig, ServerConfig
from jaxserve.types import (
    CheckpointError,
    ConfigError,
    EngineDead,
    Grammar,
    InvalidRequest,
    QueueFull,
    RequestOutput,
    SamplingParams,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from jaxserve.entry.llm import LLM

USER_ERRORS = (CheckpointError, ConfigError, InvalidRequest, UnsupportedModel)
"""Exit code 2, like click's own usage errors: the command as given can't work."""
RUN_ERRORS = (EngineDead, QueueFull, OSError)
"""Exit code 1: the command could have worked."""


# ---- flags out of fields


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a config class, as a command-line flag."""

    name: str
    hint: Any
    default: Any
    help: str

    def option(self) -> Callable[[Any], Any]:
        """The click decorator; a flag that isn't given is left to the field's default."""
        flag = self.name.replace("_", "-")
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(self.hint) if union else (self.hint,)
        kinds = [part for part in parts if part is not type(None)]
        settings: dict[str, Any] = {"help": self.help, "default": None}
        if self.default not in (None, (), {}) and self.default is not inspect.Parameter.empty:
            shown = ("no-" if self.default is False else "") + flag
            shown = shown if isinstance(self.default, bool) else self.default
            settings["help"] += f"  [default: {shown}]"
        declaration = f"--{flag}"
        if bool in kinds:
            declaration = f"--{flag}/--no-{flag}"
        elif typing.get_origin(kinds[0]) is typing.Literal:
            settings["type"] = click.Choice(typing.get_args(kinds[0]))
        elif kinds == [Grammar]:
            settings["type"] = parse_grammar
        elif tuples := [k for k in kinds if typing.get_origin(k) is tuple]:
            item = typing.get_args(tuples[0])[0]
            # of an item that may be text or something else, a flag takes the text
            settings["type"] = item if isinstance(item, type) else str
            settings["multiple"] = True
            settings["help"] += "  (repeatable)"
        elif typing.get_origin(kinds[0]) is dict:
            settings["multiple"] = True
            settings["callback"] = parse_biases
            settings["metavar"] = "ID=NUMBER"
            settings["help"] += "  (repeatable)"
        else:
            (settings["type"],) = kinds
        return click.option(declaration, self.name, **settings)


def parse_biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    """{7: -1.5} of ("7=-1.5",). Raises: BadParameter."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=NUMBER") from None
    return biases


def parse_grammar(text: str) -> Grammar:
    """A KIND=TEXT flag."""
    try:
        return Grammar.parse(text)
    except InvalidRequest as error:
        raise click.BadParameter(error.message) from None


def config_flags(kind: type[Any], skip: tuple[str, ...] = ()) -> list[Flag]:
    """The flags of a config dataclass; those of a config within it come in its place."""
    flags: list[Flag] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in skip:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            flags += config_flags(hints[field.name])
        else:
            flags.append(Flag(field.name, hints[field.name], field.default, field.metadata["help"]))
    return flags


def sampling_flags() -> list[Flag]:
    """The flags of SamplingParams; a field's help is the docstring under it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(SamplingParams))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(doc.value, ast.Constant)
            docs[field.target.id] = inspect.cleandoc(str(doc.value.value))
    hints = typing.get_type_hints(SamplingParams)
    defaults = SamplingParams()
    return [
        Flag(name, hints[name], getattr(defaults, name), docs[name])
        for name in SamplingParams.__struct_fields__
    ]


ENGINE_FLAGS = config_flags(EngineConfig, skip=("model",))
SERVER_FLAGS = config_flags(ServerConfig)
SAMPLING_FLAGS = sampling_flags()


def with_flags(flags: list[Flag]) -> Callable[[Any], Any]:
    """Decorates a command with the flags."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda inner, flag: flag.option()(inner), reversed(flags), command)

    return decorate


def given(flags: list[Flag], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the flags that were given, with their values; taken out of `arguments`."""
    values = {flag.name: arguments.pop(flag.name) for flag in flags}
    return {name: value for name, value in values.items() if value not in (None, (), {})}


def engine_config(model: str, arguments: dict[str, Any]) -> EngineConfig:
    """Raises: ConfigError."""
    fields = given(ENGINE_FLAGS, arguments)
    axes = {field.name for field in dataclasses.fields(MeshConfig)}
    mesh = MeshConfig(**{name: fields.pop(name) for name in axes & fields.keys()})
    return EngineConfig(model=model, mesh=mesh, **fields)


# ---- commands


class Commands(click.Group):
    """Commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jaxserve")
def cli() -> None:
    """Serves large language models with JAX.

    MODEL is the name of a pulled model, a .gguf file, a folder in Hugging Face's format, or a
    folder that `jaxserve convert` wrote.
    """


@cli.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetches the model NAME into the cache folder."""
    from jaxserve.entry.pull import pull

    click.echo(pull(name))


@cli.command()
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="Text to continue.  (repeatable)")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="File with one prompt a line; a bar shows how far it is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print whole results, one object a line.")
@with_flags(SAMPLING_FLAGS)
@with_flags(ENGINE_FLAGS)
def generate(
    model: str,
    prompts: tuple[str, ...],
    prompt_file: pathlib.Path | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Continues prompts and prints the text."""
    config = engine_config(model, arguments)
    params = SamplingParams(**given(SAMPLING_FLAGS, arguments))
    texts = list(prompts)
    if prompt_file is not None:
        texts += read_prompts(prompt_file)
    if not texts:
        raise click.UsageError("nothing to continue: give --prompt or --prompt-file")
    with start_llm(config) as llm:
        outputs = llm.generate(texts, params, progress=prompt_file is not None)
    for prompt, output in zip(texts, outputs, strict=True):
        print_output(prompt, output, as_json, alone=len(texts) * params.n == 1)


def read_prompts(path: pathlib.Path) -> list[str]:
    """The lines of a file. Raises: click.UsageError for a line that is no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompt-file: {path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise click.UsageError(f"--prompt-file: {path}: line {number} is empty")
    if not lines:
        raise click.UsageError(f"--prompt-file: {path} is empty")
    return lines


def print_output(prompt: str, output: RequestOutput, as_json: bool, alone: bool) -> None:
    """Prints one result; a header line tells several apart."""
    if as_json:
        import msgspec

        whole = {"prompt": prompt, **msgspec.to_builtins(output)}
        click.echo(msgspec.json.encode(whole))
        return
    for choice in output.choices:
        if not alone:
            number = f" #{choice.index}" if len(output.choices) > 1 else ""
            click.echo(click.style(f"--- {shorten(prompt)}{number}", dim=True))
        click.echo(choice.text)


def shorten(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


@cli.command()
@click.argument("model")
@click.option("--system", help="Instruction that the conversation starts with.")
@with_flags(SAMPLING_FLAGS)
@with_flags(ENGINE_FLAGS)
def chat(model: str, system: str | None, **arguments: Any) -> None:
    """Chats in the terminal.

    /reset forgets the conversation, /exit or end of file ends it, Ctrl-C stops an answer. Where
    standard input is no terminal, each of its lines is a message.
    """
    config = engine_config(model, arguments)
    params = SamplingParams(**given(SAMPLING_FLAGS, arguments))
    if params.n != 1:
        raise click.UsageError("--n has no place in a chat; allowed: 1")
    with start_llm(config) as llm:
        converse(llm, params, system)


def start_llm(config: EngineConfig) -> "LLM":
    """An engine in its own process; its start is shown on standard error, where that is no terminal
    only if it takes long.
    """
    from jaxserve.entry.llm import LLM
    from jaxserve.entry.progress import LINE_INTERVAL_S, StartupDisplay

    with StartupDisplay(sys.stderr, quiet_s=LINE_INTERVAL_S) as display:
        return LLM(config, process="spawn", on_progress=display.show)


def converse(llm: "LLM", params: SamplingParams, system: str | None) -> None:
    """Reads messages and prints answers until /exit or the end of the input."""
    instructions = [{"role": "system", "content": system}] if system is not None else []
    history = list(instructions)
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  (gives input() history and editing)

        click.echo("/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if line == "/exit":
            return
        if line == "/reset":
            history = list(instructions)
        elif line.startswith("/"):
            click.echo(f"jaxserve: {line.split()[0]} is no command; known: /reset, /exit", err=True)
        elif line:
            answered = answer(llm, [*history, {"role": "user", "content": line}], params)
            if answered is not None:
                history = answered


def answer(
    llm: "LLM", history: list[dict[str, str]], params: SamplingParams
) -> list[dict[str, str]] | None:
    """Prints the answer to a conversation as it comes; the conversation with it, or None."""
    pieces: list[str] = []
    try:
        for delta in llm.chat_stream(history, params):
            pieces.append(delta.text)
            click.echo(delta.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False)
    except InvalidRequest as error:
        click.echo(f"jaxserve: {error}", err=True)
        return None
    click.echo()
    return [*history, {"role": "assistant", "content": "".join(pieces)}]


@cli.command()
@click.argument("model")
@with_flags(SERVER_FLAGS)
@with_flags(ENGINE_FLAGS)
def serve(model: str, **arguments: Any) -> None:
    """Serves MODEL over HTTP (OpenAI's API) and, with --grpc-port, over gRPC."""
    server = ServerConfig(**given(SERVER_FLAGS, arguments))
    config = engine_config(model, arguments)
    from jaxserve.entry.serve import serve

    sys.exit(serve(config, server))


@cli.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Of the stored weights; auto: as the original has them, float32 for quantised ones.",
)
def convert(model: str, out: pathlib.Path, dtype: Any) -> None:
    """Writes MODEL as an Orbax checkpoint in the folder OUT, which loads without the original."""
    from jaxserve.entry.convert import convert

    click.echo(convert(model, out, dtype))


def main() -> None:
    """Runs the command line; a user's error is one line on standard error and exit code 2, or 1."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except USER_ERRORS as error:
        fail(str(error), 2)
    except BrokenPipeError:  # of `jaxserve ... | head`; Python would complain once more as it exits
        sys.stdout = None
        sys.exit(1)
    except RUN_ERRORS as error:
        fail(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> typing.NoReturn:
    click.echo(f"jaxserve: {' '.join(message.split())}", err=True)
    sys.exit(code)
