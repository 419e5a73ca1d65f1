"""Two results of one bench side by side: the ratio of every figure that both have.

Run: python -m bench.compare A.json B.json [--worst 1.05]
A ratio is B / A. Whether lower or higher is better follows from the unit in a figure's name; what
has neither (counts, settings) is shown and not judged. With `--worst`, exits with 1 if a figure got
worse by more than that factor.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

Better = Literal["lower", "higher"]

NOT_JUDGED = re.compile(r"_limit_ms$|^max_hit_rate$")
HIGHER = re.compile(
    r"_per_s$|(^|_)(GB|TFLOP|bytes|flops)_s$|^share_of_|hit_rate$|^kept_share$|^speedup$"
)
LOWER = re.compile(
    r"(^|_)(s|ms|us|bytes)$|(^|_)(ms|us)_per_step$|^padding_share$|^errors$|^max_difference$"
)


def better(name: str) -> Better | None:
    """Which way a figure improves, by the last part of its name; None: it can't be told."""
    name = name.rpartition(" / ")[2]
    if NOT_JUDGED.search(name):
        return None
    if HIGHER.search(name):
        return "higher"
    return "lower" if LOWER.search(name) else None


def flatten(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every number in nested dicts, names joined by ' / '. Lists are skipped: they
    hold single measurements."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from flatten(value, f"{name} / {key}" if name else key)
    elif isinstance(figures, int | float) and not isinstance(figures, bool):
        yield name, float(figures)


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure in two results."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        if self.before == self.after:
            return 1.0
        return self.after / self.before if self.before else math.copysign(math.inf, self.after)

    @property
    def worsening(self) -> float | None:
        """By which factor it got worse: over 1 is worse; None where that can't be told."""
        match better(self.name):
            case "lower":
                return self.ratio
            case "higher":
                return 1 / self.ratio if self.ratio else math.inf
            case None:
                return None


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Of the figures that both results have, in the first one's order."""
    later = dict(flatten(after))
    return [Change(name, value, later[name]) for name, value in flatten(before) if name in later]


def table(found: list[Change], worst: float | None) -> Table:
    shown = Table(Column("figure", overflow="fold"))
    for header in ("A", "B", "B / A"):
        shown.add_column(header, justify="right", no_wrap=True)
    shown.add_column(no_wrap=True)
    for change in found:
        factor = change.worsening
        verdict = ""
        if factor is not None and factor != 1:
            verdict = "worse" if factor > 1 else "better"
        if factor is not None and worst is not None and factor > worst:
            verdict = f"[red]worse by over {worst:g}[/red]"
        values = (f"{change.before:,.6g}", f"{change.after:,.6g}", f"{change.ratio:.3f}")
        shown.add_row(escape(change.name), *values, verdict)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("a", type=pathlib.Path, metavar="A.json")
    parser.add_argument("b", type=pathlib.Path, metavar="B.json")
    parser.add_argument("--worst", type=float, help="over 1, such as 1.05")
    arguments = parser.parse_args()
    if arguments.worst is not None and arguments.worst < 1:
        parser.error("--worst is the factor by which a figure may get worse: 1 or more")
    results = [json.loads(path.read_text()) for path in (arguments.a, arguments.b)]
    if not all("figures" in result for result in results):
        parser.error("a result is what a bench stored: bench, device, figures")
    if results[0]["bench"] != results[1]["bench"]:
        parser.error(f"results of two benches: {results[0]['bench']} and {results[1]['bench']}")
    console = Console()
    for letter, result in zip("AB", results, strict=True):
        told = (result[key] for key in ("device", "date", "commit", "command"))
        console.print(f"{letter}: {', '.join(told)}", markup=False, highlight=False)
    found = changes(results[0]["figures"], results[1]["figures"])
    console.print(table(found, arguments.worst))
    if arguments.worst is not None:
        worse = [c for c in found if c.worsening is not None and c.worsening > arguments.worst]
        if worse:
            raise SystemExit(f"{len(worse)} figures are worse by over {arguments.worst:g}")


if __name__ == "__main__":
    main()
