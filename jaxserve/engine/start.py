"""From a config to an engine that is ready to run: devices, weights, compiled steps, KV pages."""

import concurrent.futures
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.load import load_weights
from checkpoints.resolve import ModelFiles, resolve
from jaxserve import messages
from jaxserve.config import EngineConfig, cache_dir, compiler_environment
from jaxserve.constrained.compiler import Grammars
from jaxserve.engine.loop import Engine
from jaxserve.execution import lowering
from jaxserve.execution.buckets import Buckets
from jaxserve.execution.programs import Programs, make_private
from jaxserve.execution.runner import Runner
from jaxserve.memory import kv_cache
from jaxserve.models import registry
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.types import CheckpointError, ConfigError, EngineInfo
from pallas_kernels import dispatch
from pallas_kernels.paged_attention.api import AttentionSpec, Implementation
from sharding.mesh import make_mesh

log = logging.getLogger(__name__)

type Tell = Callable[..., None]
"""Called with a stage and a text, and where it counts something, how much is done and of how
much."""


def start(config: EngineConfig, link: messages.EngineEnd) -> Engine:
    """Loads, compiles and allocates, telling each stage over `link` and, last, that the engine is
    Ready.

    Weights are read while the steps compile.
    Raises: ConfigError, CheckpointError, UnsupportedModel.
    """
    started = time.monotonic()

    def tell(stage: str, text: str, done: int = 0, total: int = 0) -> None:
        link.send(messages.Progress(stage, text, done, total))

    files = resolve(config.model)
    if config.load_format == "auto" and not files.has_weights:
        raise CheckpointError(f"{files.path} has no weights; load_format dummy makes random ones")
    devices = find_devices(config)
    platform = devices[0].platform
    mesh = make_mesh(config.mesh, devices)
    dtype = choose_dtype(config.dtype, platform)
    model = registry.build(files.config, mesh, config.layout, dtype)

    limits = decide_limits(config, model.config.max_position_embeddings, platform)
    attention = choose_attention(config, model, devices[0])
    buckets = Buckets.choose(
        platform=platform,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        pages=-(-limits.max_model_len // config.page_size),
    )
    runner = Runner(
        model,
        mesh,
        buckets,
        page_size=config.page_size,
        kv_dtype=jnp.dtype(dtype),
        attention=attention,
        embeddings=config.embeddings,
        programs=Programs(devices, program_folder(config), compiler_environment()),
        lowerers=make_lowerers(config, files, devices, dtype, buckets, attention),
    )
    tell(
        "setup", f"{files.name} on {mesh.size} x {devices[0].device_kind}, {jnp.dtype(dtype).name}"
    )

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        usable = kv_cache.usable_bytes(devices[0], config.memory_fraction)
        most_kv_bytes = kv_cache.CPU_KV_BYTES if platform == "cpu" else usable
        loading = threads.submit(load, config, files, model, tell)
        compile_started = time.monotonic()
        runner.compile(
            config.num_pages,
            usable,
            most_kv_bytes,
            lambda text, done, total: tell("compile", text, done, total),
        )
        compile_s = time.monotonic() - compile_started
        params, load_s = loading.result()
    runner.start([params[name] for name in model.abstract])

    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            max_model_len=limits.max_model_len,
            page_size=config.page_size,
            num_pages=runner.num_pages,
            policy=config.policy,
            prefix_cache=config.prefix_cache,
        )
    )
    info = EngineInfo(
        model=files.name,
        model_type=model.config.model_type,
        vocab_size=model.config.vocab_size,
        num_parameters=sum(leaf.size for leaf in params.values()),
        weight_bytes=sum(leaf.nbytes for leaf in params.values()),
        max_model_len=limits.max_model_len,
        max_request_tokens=scheduler.config.max_request_tokens,
        max_num_seqs=limits.max_num_seqs,
        num_pages=runner.num_pages - 1,
        page_size=config.page_size,
        kv_bytes=runner.kv_bytes,
        platform=platform,
        device_kind=devices[0].device_kind,
        mesh={name: mesh.shape[name] for name in mesh.axis_names},
        dtype=jnp.dtype(dtype).name,
        attention=attention,
        num_compiled=runner.num_compiled,
        compile_s=compile_s,
        load_s=load_s,
        startup_s=time.monotonic() - started,
        programs=runner.programs.counts,
    )
    grammars = Grammars(model.config.vocab_size, config.grammar_timeout_s)
    engine = Engine(runner, scheduler, link, grammars, overlap=config.overlap)
    link.send(messages.Ready(info))
    return engine


def load(
    config: EngineConfig, files: ModelFiles, model: registry.BuiltModel, tell: Tell
) -> tuple[dict[str, jax.Array], float]:
    """The parameters, on their devices, and the seconds that took."""
    started = time.monotonic()
    if config.load_format == "dummy":
        params = model.random_params(config.weights_seed)
    else:
        params = load_weights(files, model.abstract, model.rules, model.config, model.ignored)
    jax.block_until_ready(params)
    seconds = time.monotonic() - started
    tell("load", f"weights ready after {seconds:.1f} s")
    return params, seconds


@dataclasses.dataclass(frozen=True)
class Limits:
    """What EngineConfig leaves open, decided."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int


def decide_limits(config: EngineConfig, model_len: int, platform: str) -> Limits:
    """Raises: ConfigError where the config contradicts the model."""
    max_model_len = model_len if config.max_model_len is None else config.max_model_len
    if max_model_len > model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; allowed: up to {model_len}, the model's own"
        )
    on_cpu = platform == "cpu"
    max_batched_tokens = config.max_batched_tokens or max(
        config.max_num_seqs or 0, 256 if on_cpu else 4096
    )
    max_num_seqs = config.max_num_seqs or min(max_batched_tokens, 32 if on_cpu else 256)
    return Limits(max_model_len, max_num_seqs, max_batched_tokens)


def choose_attention(
    config: EngineConfig, model: registry.BuiltModel, device: Any
) -> Implementation:
    """The attention implementation asked for, or the best for the shapes that each device sees.

    Raises: ConfigError if the one asked for can't do them.
    """
    spec = AttentionSpec(
        kind="decode",
        num_heads=model.config.num_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.page_size,
        kv_dtype=next(iter(model.abstract.values())).dtype.name,
        sliding_window=model.config.sliding_window,
    )
    spec = spec.shard(config.mesh.tensor)
    if config.attention == "auto":
        return dispatch.choose(device.platform, device.device_kind, spec)
    if reason := dispatch.unsupported(config.attention, device.platform, spec):
        raise ConfigError(f"attention is {config.attention!r}, which can't do {reason}")
    return config.attention


def make_lowerers(
    config: EngineConfig,
    files: ModelFiles,
    devices: Sequence[Any],
    dtype: jnp.dtype,
    buckets: Buckets,
    attention: Implementation,
) -> lowering.Lowerers | None:
    """Processes that lower the steps, where that is worth while."""
    count = min(lowering.num_processes(attention), len(buckets.steps()))
    if not count or not jax.config.jax_use_shardy_partitioner:  # which what they export needs
        return None
    try:
        topology = lowering.describe(devices)
    # Of a plugin that can't, with whatever it raises.
    except Exception as error:
        log.warning("no processes lower steps, as the devices can't be described: %s", error)
        return None
    source = lowering.StepSource(
        config=files.config,
        mesh=config.mesh,
        platform="cuda" if devices[0].platform == "gpu" else devices[0].platform,
        topology=topology,
        layout=config.layout,
        dtype=jnp.dtype(dtype).name,
        buckets=buckets,
        page_size=config.page_size,
        attention=attention,
        embeddings=config.embeddings,
        settings=lowering.tracing_settings(),
    )
    return lowering.Lowerers(source, count)


def find_devices(config: EngineConfig) -> list[Any]:
    """The devices of the mesh. Raises: ConfigError when there are not enough of that kind."""
    try:
        found = jax.devices(None if config.platform == "auto" else config.platform)
    except RuntimeError as error:
        raise ConfigError(
            f"platform is {config.platform!r}, which JAX can't use here: {error}"
        ) from error
    need = config.mesh.num_devices
    if len(found) < need:
        hint = " (JAX_NUM_CPU_DEVICES makes more of a CPU)" if found[0].platform == "cpu" else ""
        raise ConfigError(f"the mesh needs {need} devices; there are {len(found)}{hint}")
    return found[:need]


def choose_dtype(name: str, platform: str) -> jnp.dtype:
    # XLA's bfloat16 matmul on a CPU reaches a tenth of float32's rate
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def program_folder(config: EngineConfig) -> pathlib.Path | None:
    """Where compiled steps are kept, beside what JAX keeps where it does. None: nowhere.

    Raises: ConfigError when the folder asked for can't be used.
    """
    if config.compile_cache == "off":
        return None
    beside = jax.config.jax_compilation_cache_dir
    folder = pathlib.Path(beside if beside and "://" not in beside else cache_dir()) / "programs"
    try:
        return make_private(pathlib.Path(config.compile_cache or folder))
    except OSError as error:
        if config.compile_cache:
            raise ConfigError(f"compile_cache is {config.compile_cache}: {error}") from error
        log.warning("compiled steps are not kept, as %s can't be used: %s", folder, error)
        return None
