"""jaxserve: an engine that serves large language models with JAX. Importing it imports no jax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig, MeshConfig
    from jaxserve.entry.llm import LLM, AsyncLLM
    from jaxserve.lang import (
        ProgramCancelled,
        ProgramError,
        Runtime,
        RuntimeEndpoint,
        State,
        assistant,
        function,
        gen,
        select,
        set_default_backend,
        system,
        user,
    )
    from jaxserve.types import (
        CheckpointError,
        Choice,
        ChosenLogprob,
        ConfigError,
        ContextExceeded,
        Delta,
        EngineDead,
        EngineInfo,
        EngineStats,
        Grammar,
        InvalidRequest,
        QueueFull,
        RequestFailed,
        RequestOutput,
        SamplingParams,
        UnsupportedModel,
        Usage,
    )

__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxserve.entry.llm",
    "AsyncLLM": "jaxserve.entry.llm",
    "EngineConfig": "jaxserve.config",
    "MeshConfig": "jaxserve.config",
    **dict.fromkeys(
        (
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
        ),
        "jaxserve.lang",
    ),
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Choice",
    "ChosenLogprob",
    "ConfigError",
    "ContextExceeded",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "EngineInfo",
    "EngineStats",
    "Grammar",
    "InvalidRequest",
    "MeshConfig",
    "ProgramCancelled",
    "ProgramError",
    "QueueFull",
    "RequestFailed",
    "RequestOutput",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "State",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "assistant",
    "function",
    "gen",
    "select",
    "set_default_backend",
    "system",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "jaxserve.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
