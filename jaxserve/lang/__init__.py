"""A language for programs that call a model: text, gen, select, roles and forks.

    @function
    def capital(s, country):
        s += user(f"What is the capital of {country}?")
        s += assistant(gen("city", max_tokens=8))

    set_default_backend(Runtime("smollm2-135m-instruct"))
    capital.run("France")["city"]

The idea, and that of a prefix cache for it, is SGLang's (arXiv:2312.07104). Imports no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.lang.backend import Backend, set_default_backend
from jaxserve.lang.expressions import ProgramError, assistant, gen, select, system, user
from jaxserve.lang.program import Program, function
from jaxserve.lang.state import Forks, State
from jaxserve.lang.transcript import ProgramCancelled

if TYPE_CHECKING:
    from jaxserve.lang.endpoint import RuntimeEndpoint
    from jaxserve.lang.runtime import Runtime

_HOME = {"Runtime": "jaxserve.lang.runtime", "RuntimeEndpoint": "jaxserve.lang.endpoint"}
__all__ = [
    "Backend",
    "Forks",
    "Program",
    "ProgramCancelled",
    "ProgramError",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "assistant",
    "function",
    "gen",
    "select",
    "set_default_backend",
    "system",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
