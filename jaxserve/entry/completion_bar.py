"""A progress bar over finished requests or programs, with generated tokens per second."""

from typing import Self

from jaxserve.types import RequestOutput


class CompletionBar:
    """Shows how many are finished; nothing if it isn't wanted."""

    def __init__(self, total: int, wanted: bool):
        self._progress = None
        self._num_tokens = 0
        if wanted:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=total, rate=0.0)

    def add_output(self, output: RequestOutput) -> None:
        self.add(output.usage.completion_tokens)

    def add(self, num_tokens: int) -> None:
        """One more is finished, with these tokens. By one thread."""
        if self._progress is None:
            return
        self._num_tokens += num_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed_s if elapsed_s else 0.0
        self._progress.update(self._task, advance=1, rate=rate)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
