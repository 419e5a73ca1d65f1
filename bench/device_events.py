"""What ran on the device, kernel by kernel, and what the host did meanwhile, out of JAX's
profiler."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax

Event = tuple[str, int, int]
"""(name, start, duration), in nanoseconds."""


class Recording(NamedTuple):
    kernels: list[Event]
    """What the first GPU ran, by start."""
    host: dict[str, list[Event]]
    """By thread: what JAX and XLA noted of their work, not Python's calls; may be nested."""


def recorded(run: Callable[[], object]) -> Recording:
    """Of what happens while `run` runs.

    Under the profiler XLA uses no command buffers: gaps are larger than they are in service.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    kernels: list[Event] = []
    host: dict[str, list[Event]] = {}
    for plane in data.planes:
        for line in plane.lines:
            events = [
                (event.name, int(event.start_ns), int(event.duration_ns)) for event in line.events
            ]
            if plane.name.startswith("/device:") and line.name.startswith("Stream"):
                kernels += events
            elif plane.name.startswith("/host:"):
                host[line.name] = host.get(line.name, []) + events
    return Recording(sorted(kernels, key=lambda event: event[1]), host)
