"""Results as PNG files: latency over batch, percentiles of a server, kernels' share of the copy
rate.

Run: python -m bench.plot RESULT.json... [--out FOLDER]
Results of one bench go into one picture, <bench>.png. Needs matplotlib: pip install -e '.[bench]'
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    raise SystemExit("bench.plot needs matplotlib: pip install -e '.[bench]'") from None

Result = dict[str, Any]
"""What `record.store` wrote."""
LATENCIES = ("time_to_first_token", "time_per_output_token", "time_between_tokens", "end_to_end")
PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")


def label(result: Result) -> str:
    return f"{result['device']}, {result['commit']}, {result['date'][:10]}"


def plot_latency(figure: Figure, results: Sequence[Result]) -> None:
    """Milliseconds a decode step over batch, a line a result; the floor, where known, dashed."""
    axes = figure.subplots()
    for result in results:
        decode = result["figures"]["decode"]
        batches = [int(name.removeprefix("batch ")) for name in decode]
        steps = [found["ms_per_step"] for found in decode.values()]
        (line,) = axes.plot(batches, steps, marker="o", label=label(result))
        if all("floor_ms" in found for found in decode.values()):
            floors = [found["floor_ms"] for found in decode.values()]
            axes.plot(batches, floors, "--", color=line.get_color(), label="its floor")
    every = sorted({int(b.removeprefix("batch ")) for r in results for b in r["figures"]["decode"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(batch) for batch in every])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch, sequences")
    axes.set_ylabel("decode step, ms")
    axes.legend()


def plot_serve(figure: Figure, results: Sequence[Result]) -> None:
    """A panel a latency, a group of bars a percentile, a bar a result."""
    found = [name for name in LATENCIES if any(r["figures"].get(name) for r in results)]
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, name in zip(panels, found, strict=True):
        values = [
            [result["figures"].get(name, {}).get(p, 0.0) for p in PERCENTILES] for result in results
        ]
        names = [f"{label(r)}, {r['figures'].get('transport', 'http')}" for r in results]
        bars(axes, [p.removesuffix("_ms") for p in PERCENTILES], names, values)
        axes.set_title(name.replace("_", " "))
        axes.set_ylabel("ms")
    panels[0].legend(fontsize="small")


def plot_kernels(figure: Figure, results: Sequence[Result]) -> None:
    """Share of the copy rate, a group of bars a case, a bar an implementation and result."""
    cases = list(dict.fromkeys(case for r in results for case in r["figures"]["cases"]))
    names, values = [], []
    for result in results:
        found = result["figures"]["cases"]
        impls = dict.fromkeys(
            impl
            for case in found.values()
            for impl, one in case.items()
            if isinstance(one, dict) and "share_of_copy_rate" in one
        )
        for impl in impls:
            names.append(f"{impl}, {label(result)}")
            values.append(
                [found.get(c, {}).get(impl, {}).get("share_of_copy_rate", 0.0) for c in cases]
            )
    axes = figure.subplots()
    bars(axes, cases, names, values)
    axes.tick_params("x", rotation=90)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the copy rate")
    axes.legend()


def bars(
    axes: Axes, groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]
) -> None:
    """Bars side by side in each group: `values[name][group]`."""
    width = 0.8 / max(len(names), 1)
    for i, (name, heights) in enumerate(zip(names, values, strict=True)):
        offsets = [group + width * (i - (len(names) - 1) / 2) for group in range(len(groups))]
        axes.bar(offsets, heights, width, label=name)
    axes.set_xticks(range(len(groups)), groups)


PLOTS: dict[str, tuple[Callable[[Figure, Sequence[Result]], None], tuple[float, float]]] = {
    "latency": (plot_latency, (8, 5)),
    "serve": (plot_serve, (16, 5)),
    "kernels": (plot_kernels, (12, 8)),
}
"""By bench: what draws its results, and the picture's size in inches."""


def plot(results: Sequence[Result], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes one PNG for each bench among the results; returns their paths."""
    paths = []
    for bench in dict.fromkeys(result["bench"] for result in results):
        draw, size = PLOTS[bench]
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, [result for result in results if result["bench"] == bench])
        paths.append(folder / f"{bench}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=pathlib.Path, metavar="RESULT.json")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(), help="default: here")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.results]
    for path, result in zip(arguments.results, results, strict=True):
        if result.get("bench") not in PLOTS:
            parser.error(f"{path} is no result of {', '.join(PLOTS)}")
    for path in plot(results, arguments.out):
        print(path)


if __name__ == "__main__":
    main()
