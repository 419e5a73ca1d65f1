"""The command of an example: runs its program here or on a server, and prints what it wrote."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve import Runtime, RuntimeEndpoint, State, set_default_backend
from jaxserve.lang import Program


def main(
    program: Program, items: Sequence[Mapping[str, Any]], show: Callable[[State], str] = State.text
) -> None:
    """Runs the program with each item's arguments, all side by side."""
    parser = argparse.ArgumentParser(description=program.__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="of a jaxserve server, to run on instead of a model here")
    arguments = parser.parse_args()
    with RuntimeEndpoint(arguments.url) if arguments.url else Runtime(arguments.model) as backend:
        set_default_backend(backend)
        for state in program.run_batch(items, progress_bar=True):
            print(show(state), end="\n\n")
