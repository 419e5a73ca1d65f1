"""Lowers steps in processes of their own.

Tracing and lowering a step of Pallas kernels is seconds of Python, which threads can't share out.
It needs no device, only a description of it. So each process builds the engine's runner anew from a
`StepSource`, and exports the steps that it is asked for as StableHLO, which the engine compiles:

    engine   asks ────────────────────────── compiles A, C, B, ...
    process 1    lowers A, then C, ...
    process 2    lowers B, then D, ...

What no process can do, the engine does itself.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jaxlib import xla_client

from jaxserve.execution.buckets import Buckets, StepShape
from jaxserve.execution.programs import NO_MATTER, Exported
from jaxserve.models import registry
from pallas_kernels.paged_attention.api import Implementation
from sharding.mesh import MeshShape, make_mesh

if TYPE_CHECKING:
    from jaxserve.execution.runner import Runner

log = logging.getLogger(__name__)

MOST_PROCESSES = 8

NO_TRACING = (
    *NO_MATTER,
    "jax_backend_target",
    "jax_cuda_visible_devices",
    "jax_default_device",
    "jax_mock_gpu_topology",
    "jax_pjrt_client_create_options",
    "jax_platform_name",
    "jax_xla_backend",
    "mock_num_gpu_processes",
)
"""Beginnings of the names of JAX's settings that say where programs run, not what they are."""


def num_processes(attention: Implementation) -> int:
    """How many are worth having: half of the processors, the others compile; none where steps hold
    no GPU kernels, which are what takes long to lower."""
    if attention != "gpu":
        return 0
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2)
    return count if count > 1 else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSource:
    """All that decides an engine's steps, in a form that another process can be given."""

    config: Mapping[str, Any]
    """The model's config.json."""
    mesh: MeshShape
    platform: str
    """Of the devices, as jax.export names it: cpu, cuda."""
    topology: bytes
    """Of the devices, as `describe` gives it."""
    layout: str
    dtype: str
    buckets: Buckets
    page_size: int
    attention: Implementation
    embeddings: bool
    settings: Mapping[str, Any]
    """JAX's, as `tracing_settings` gives them."""

    def runner(self) -> "Runner":
        """The engine's, for devices that need not be here."""
        from jaxserve.execution.runner import Runner  # which imports this

        for name, value in self.settings.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        jax.devices()  # finds the plugins
        if self.platform == "cuda" and not xla_client.pjrt_plugin_initialized(self.platform):
            xla_client.initialize_pjrt_plugin(self.platform)
        devices = topologies.TopologyDescription.deserialize(self.topology).devices
        mesh = make_mesh(self.mesh, devices)
        model = registry.build(self.config, mesh, self.layout, jnp.dtype(self.dtype))
        return Runner(
            model,
            mesh,
            self.buckets,
            page_size=self.page_size,
            kv_dtype=jnp.dtype(self.dtype),
            attention=self.attention,
            embeddings=self.embeddings,
        )


def tracing_settings() -> dict[str, Any]:
    """JAX's settings here that may decide what a program is traced or lowered to: a program that
    the engine is part of may have set them after JAX had read the environment."""
    return {k: v for k, v in jax.config.values.items() if not k.startswith(NO_TRACING)}


def describe(devices: Sequence[Any]) -> bytes:
    """A description of devices, to lower for them elsewhere."""
    return topologies.TopologyDescription(list(devices)).serialize()


class Lowerers:
    """Processes that lower steps. They start when `export` is first called, and end with
    `close`."""

    def __init__(self, source: StepSource, num_processes: int):
        self._source = source
        self._num_processes = num_processes
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._is_started = self._has_failed = self._is_closed = False

    def export(self, shape: StepShape, num_pages: int) -> Exported | None:
        """The step, lowered for so many KV pages; waits for an idle process. Threads may call it at
        the same time. None: the engine is to do it, as one process has failed.

        Raises: CancelledError after `close`.
        """
        with self._lock:
            if not self._is_started and not self._is_closed:
                self._is_started = True
                self._start()
        if self._processes:
            process = self._idle.get()
            try:
                if not self._has_failed and not self._is_closed:
                    _send(process.stdin, (shape, num_pages))
                    answer = pickle.load(process.stdout)  # pyright: ignore[reportArgumentType]
                    if isinstance(answer, Exported):
                        return answer
                    self._fail(answer)
            # Whatever it is, the engine can do without.
            except Exception as error:
                self._fail(repr(error))
            finally:
                self._idle.put(process)
        if self._is_closed:
            raise concurrent.futures.CancelledError
        return None

    def close(self) -> None:
        """Ends the processes, whatever they are doing. Safe to call twice."""
        with self._lock:
            self._is_closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what it was sent last and never read
                    pipe.close()  # pyright: ignore[reportOptionalMemberAccess]

    def _start(self) -> None:
        try:
            # they have no device: a GPU's memory is the engine's alone
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            # and the engine's code, whatever lies in the working folder
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
            for _ in range(self._num_processes):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "jaxserve.execution.lowering"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,  # a terminal's Ctrl-C is not for it
                )
                self._processes.append(process)
                self._idle.put(process)
            for process in self._processes:  # a long one waits until it is read
                _send(process.stdin, self._source)
        # Whatever it is, the engine can do without.
        except Exception as error:
            self._fail(repr(error))

    def _fail(self, what: str) -> None:
        if not self._has_failed and not self._is_closed:
            log.warning("a process that lowers steps failed; the engine does it itself: %s", what)
        self._has_failed = True


def _send(pipe: Any, value: Any) -> None:
    pickle.dump(value, pipe)
    pipe.flush()


def main() -> None:
    """Reads a StepSource and then shapes, with numbers of pages, from standard input until it
    closes; answers each with an Exported, or a text that says what went wrong."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    runner = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        source: StepSource = pickle.load(sys.stdin.buffer)
        while True:
            shape, runner_pages = pickle.load(sys.stdin.buffer)
            started = time.monotonic()
            try:
                runner = runner or source.runner()
                runner.num_pages = runner_pages
                data = runner.step_program(shape).export(source.platform)
                answer: Any = Exported(data, time.monotonic() - started)
            # Whatever it is, the engine is to know, and do it itself.
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            _send(answers, answer)


if __name__ == "__main__":
    main()
