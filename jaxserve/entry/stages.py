"""Shows how far a command's stages are, in bytes: bars on a terminal, lines elsewhere. No jax."""

from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
import rich.progress


class Stages:
    """Shows one bar a stage, or prints one line a stage, or nothing."""

    def __init__(
        self,
        bars: rich.progress.Progress | None = None,
        console: rich.console.Console | None = None,
    ):
        self._bars = bars
        self._console = console

    def start(self, what: str, subject: str, num_bytes: int) -> rich.progress.TaskID | None:
        """Begins a stage, such as "reading" a file; what it returns is `reach`'s first argument."""
        if self._bars is not None:
            return self._bars.add_task(what, total=num_bytes)
        if self._console is not None:
            self._console.print(
                f"{what} {subject} ({num_bytes / 1e6:.0f} MB)", highlight=False, soft_wrap=True
            )
        return None

    def reach(self, stage: rich.progress.TaskID | None, done_bytes: int) -> None:
        if self._bars is not None and stage is not None:
            self._bars.update(stage, completed=done_bytes)


@contextmanager
def shown(progress: bool) -> Iterator[Stages]:
    """Stages on stderr, while inside; silent ones unless `progress`."""
    console = rich.console.Console(stderr=True)
    if not progress:
        yield Stages()
    elif not console.is_terminal:
        yield Stages(console=console)
    else:
        with rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
        ) as bars:
            yield Stages(bars)
