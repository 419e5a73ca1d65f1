"""Shows what an engine's start is doing: bars on a terminal, lines elsewhere. Imports no jax."""

import time
from typing import Self, TextIO

import rich.console
import rich.progress

from jaxserve.messages import Progress

LINE_INTERVAL_S = 5.0
"""Where there is no terminal: how often at most a stage that counts is told."""


class StartupDisplay:
    """Shows Progress messages while it is entered."""

    def __init__(self, out: TextIO, quiet_s: float = 0.0):
        """`quiet_s`: where there is no terminal, a start says nothing unless it takes longer."""
        self._out = out
        self._quiet_until_s = time.monotonic() + quiet_s
        self._bars: rich.progress.Progress | None = None
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._told_s: dict[str, float] = {}
        if out.isatty():
            self._bars = rich.progress.Progress(
                rich.progress.TextColumn("{task.fields[stage]:<9}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeElapsedColumn(),
                console=rich.console.Console(file=out),
                transient=True,
            )

    def show(self, message: Progress) -> None:
        if self._bars is not None and message.total:
            self._show_bar(self._bars, message)
        elif self._bars is not None:
            self._bars.console.print(f"{message.stage:<9} {message.text}", highlight=False)
        else:
            self._show_line(message)

    def _show_bar(self, bars: rich.progress.Progress, message: Progress) -> None:
        task = self._tasks.get(message.stage)
        if task is None:
            task = bars.add_task("", total=message.total, stage=message.stage)
            self._tasks[message.stage] = task
        bars.update(task, completed=message.done, total=message.total, description=message.text)

    def _show_line(self, message: Progress) -> None:
        if time.monotonic() < self._quiet_until_s:
            return
        count = ""
        if message.total:
            now_s = time.monotonic()
            last_s = self._told_s.get(message.stage, -LINE_INTERVAL_S)
            if message.done < message.total and now_s - last_s < LINE_INTERVAL_S:
                return
            self._told_s[message.stage] = now_s
            count = f" {message.done}/{message.total}"
        print(f"{message.stage:<9}{count} {message.text}", file=self._out, flush=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()
