"""Every setting, validated in one place: frozen dataclasses whose fields become command-line flags.

A field's `help` is its flag's help text. `None` means "decided from the device and the model at
start", and the engine says what it decided. The only file that reads environment variables. Imports
no jax.
"""

import dataclasses
import os
import pathlib
import types
import typing
from typing import Any, Literal

from jaxserve.types import ConfigError


def setting(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


def cache_dir() -> pathlib.Path:
    """Where pulled models and compiled steps are kept: $JAXSERVE_CACHE, else
    $XDG_CACHE_HOME/jaxserve, else ~/.cache."""
    if path := os.environ.get("JAXSERVE_CACHE"):
        return pathlib.Path(path)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxserve"


def compiler_environment() -> dict[str, str]:
    """The variables that change what is compiled; JAX's own are among its settings."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "MOSAIC_GPU_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def check_types(config: Any) -> None:
    """Raises ConfigError for a field whose value isn't of its type, or not among its choices."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        choices: list[Any] = []
        kinds: list[type] = []
        for part in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if typing.get_origin(part) is Literal:
                choices += typing.get_args(part)
            else:
                kinds.append(typing.get_origin(part) or part)
        if float in kinds:
            kinds.append(int)
        if type(value) in kinds or value in choices:
            continue
        allowed = choices or [kind.__name__ for kind in kinds if kind is not type(None)]
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_range(config: Any, name: str, low: float, high: float = float("inf")) -> None:
    """Raises ConfigError unless the field is None or a number within [low, high]."""
    value = getattr(config, name)
    if value is not None and not low <= value <= high:
        upto = "" if high == float("inf") else f" to {high}"
        raise ConfigError(f"{name} is {value!r}; allowed: {low}{upto or ' or more'}")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis has."""

    data: int = setting(1, "copies of the model that share the work (only 1 so far)")
    expert: int = setting(
        1, "devices that the experts of a mixture model are spread over (only 1 so far)"
    )
    tensor: int = setting(
        1, "devices that every layer is split over; heads, width and experts must divide"
    )

    def __post_init__(self):
        check_types(self)
        for name in ("data", "expert", "tensor"):
            check_range(self, name, 1)
        for name in ("data", "expert"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; allowed: 1 (no model uses this axis yet)"
                )

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.tensor


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What to serve and how. Raises ConfigError from the constructor."""

    model: str = setting(
        "smollm2-135m-instruct",
        "a pulled model's name, a .gguf file, a Hugging Face folder, or a converted folder",
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = setting("auto", "device kind to run on")
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "dummy: random weights of the model's shapes, no weight files needed"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "of weights and activations; auto: float32 on CPU, else bfloat16"
    )
    mesh: MeshConfig = dataclasses.field(
        default_factory=MeshConfig, metadata={"help": "mesh axis sizes"}
    )
    layout: str = setting("tensor", "named sharding layout, from sharding/layouts.py")
    attention: Literal["auto", "reference", "gpu", "tpu"] = setting(
        "auto", "attention implementation; auto: the device's kernel, else the reference"
    )
    max_model_len: int | None = setting(
        None, "most tokens of a sequence; default: the model's own limit"
    )
    max_num_seqs: int | None = setting(
        None, "most sequences in one step; default: 32 on CPU, else 256"
    )
    max_batched_tokens: int | None = setting(
        None, "token budget of one step; default: 256 on CPU, else 4096"
    )
    max_queue: int = setting(
        1024, "requests that may wait beyond those running; more are answered 429"
    )
    policy: Literal["fcfs", "longest-prefix", "longest-output", "priority"] = setting(
        "fcfs", "order in which waiting requests are admitted"
    )
    page_size: int = setting(16, "tokens in a KV page: 8, 16, 32, 64 or 128")
    num_pages: int | None = setting(
        None, "KV pages; default: what fits in memory_fraction of the device's memory"
    )
    memory_fraction: float = setting(
        0.9, "share of the device's memory for weights, steps and KV (of what is free, on CPU)"
    )
    prefix_cache: bool = setting(True, "share computed prefixes between requests")
    embeddings: bool = setting(
        False, "also serve embeddings: steps that read prompts give their hidden states too"
    )
    overlap: bool = setting(True, "send the next step before the last one's tokens are read")
    grammar_timeout_s: float = setting(
        10.0, "how long compiling a request's grammar may take before the request is refused"
    )
    compile_cache: str | None = setting(
        None, "folder that keeps compiled steps; default: in the cache folder; 'off': none"
    )
    weights_seed: int = setting(0, "of the random weights of load_format dummy")

    def __post_init__(self):
        check_types(self)
        if not self.model:
            raise ConfigError("model is empty; allowed: a name, a .gguf file or a folder")
        check_range(self, "max_model_len", 2)
        for name in ("max_num_seqs", "max_batched_tokens"):
            check_range(self, name, 1)
        check_range(self, "max_queue", 0)
        check_range(self, "weights_seed", 0, 2**31 - 1)
        check_range(self, "num_pages", 2)
        check_range(self, "memory_fraction", 0.01, 1.0)
        check_range(self, "grammar_timeout_s", 0.0)
        if self.page_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"page_size is {self.page_size}; allowed: 8, 16, 32, 64, 128")
        if (
            self.max_num_seqs
            and self.max_batched_tokens
            and self.max_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"max_batched_tokens is {self.max_batched_tokens}; "
                f"allowed: at least max_num_seqs ({self.max_num_seqs})"
            )

    def prepare_process(self) -> None:
        """Sets what JAX reads from the environment when it starts. For a process that only runs
        this engine."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(self.memory_fraction))
        if self.platform in ("cpu", "auto") and self.mesh.num_devices > 1:
            os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(self.mesh.num_devices))


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where and how the servers listen. Raises ConfigError from the constructor."""

    host: str = setting("127.0.0.1", "address to bind, for HTTP and gRPC")
    port: int = setting(8000, "HTTP port; 0: a free one, printed at start")
    grpc_port: int | None = setting(None, "gRPC port; 0: a free one; not given: no gRPC server")
    served_model_name: str | None = setting(
        None, "name that requests use for the model; default: the MODEL's own name"
    )
    grace_s: float = setting(
        30.0, "after SIGTERM, how long running requests may go on before they are told it's over"
    )
    max_body_bytes: int = setting(16 << 20, "largest HTTP body or gRPC message")
    restart_engine: bool = setting(
        False, "start the engine anew when it dies, instead of exiting with an error"
    )
    files_dir: str | None = setting(
        None, "folder for uploaded files and batches; not given: no /v1/files and /v1/batches"
    )
    max_files_bytes: int = setting(1 << 30, "most that files_dir may hold")
    tool_call_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "deepseek"
    ] = setting("auto", "format of the model's tool calls; auto: what its chat template shows")
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = setting(
        "auto", "format of the model's thinking; auto: what its chat template shows"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe log line to print"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "form of the log: lines of text, or one JSON object a line"
    )
    log_text: bool = setting(
        False, "put prompts and answers of requests in the log, which holds none otherwise"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL that takes OpenTelemetry's traces (OTLP over HTTP), a span for each request; "
        "needs jaxserve[otel]",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "a key that HTTP requests and gRPC calls must bring, as Authorization: Bearer KEY; "
        "any may come if none is set",
    )
    api_key_file: str | None = setting(None, "file with such keys, one a line")
    grpc_tls_cert: str | None = setting(
        None, "PEM file with the gRPC server's certificate, or chain; not given: no TLS"
    )
    grpc_tls_key: str | None = setting(None, "PEM file with the certificate's private key")
    grpc_tls_client_ca: str | None = setting(
        None, "PEM file with the authorities that must have signed the certificates of gRPC clients"
    )
    cors_origin: tuple[str, ...] = setting(
        (), "a web origin whose pages may use the HTTP server from a browser, or *; default: none"
    )

    def __post_init__(self):
        check_types(self)
        check_range(self, "port", 0, 65535)
        check_range(self, "grpc_port", 0, 65535)
        check_range(self, "grace_s", 0)
        check_range(self, "max_body_bytes", 1024)
        check_range(self, "max_files_bytes", 0)
        if not all(key.strip() == key != "" and key.isascii() for key in self.api_key):
            raise ConfigError(
                "api_key has one that is empty, or not ASCII, or has spaces around it"
            )

        given = [
            name
            for name in ("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca")
            if getattr(self, name) is not None
        ]
        if given and (self.grpc_tls_cert is None or self.grpc_tls_key is None):
            raise ConfigError(f"{given[0]} is given without grpc_tls_cert and grpc_tls_key")
        if given and self.grpc_port is None:
            raise ConfigError(f"{given[0]} is given without grpc_port: no gRPC server runs")

    def all_api_keys(self) -> tuple[str, ...]:
        """Those given, and those of the file. Raises: ConfigError if that can't be read."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = pathlib.Path(self.api_key_file).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file is {self.api_key_file!r}: {error}") from None
        if not lines:
            raise ConfigError(f"api_key_file is {self.api_key_file!r}, which holds no key")
        return (*self.api_key, *lines)
