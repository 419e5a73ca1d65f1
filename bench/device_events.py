"""What ran on the device, kernel by kernel, out of JAX's profiler."""

import pathlib
import tempfile
from collections.abc import Callable

import jax


def recorded(run: Callable[[], object]) -> list[tuple[str, int, int]]:
    """(name, start, duration) in nanoseconds of what the first GPU ran meanwhile, by start.

    Under the profiler XLA uses no command buffers: gaps are larger than they are in service.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    events = [
        (event.name, int(event.start_ns), int(event.duration_ns))
        for plane in data.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(events, key=lambda event: event[1])
