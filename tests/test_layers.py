"""Who may import whom: arrows only downward, and no jax where there must be none."""

import ast
import pathlib
import subprocess
import sys

import pytest

from jaxserve.execution.programs import TRACED

ROOT = pathlib.Path(__file__).parent.parent
OURS = {"jaxserve", "pallas_kernels", "sharding", "checkpoints"}

ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"sharding"},
    "checkpoints": {"checkpoints", "sharding", "jaxserve.types", "jaxserve.config"},
    "jaxserve.observation": set(),
    "jaxserve.types": {"jaxserve.observation"},
    "jaxserve.config": {"jaxserve.types"},
    "jaxserve.messages": {"jaxserve.types", "jaxserve.observation"},
    "jaxserve.metrics": {"jaxserve.types", "jaxserve.observation"},
    "jaxserve.scheduler": {"jaxserve.scheduler", "jaxserve.memory", "jaxserve.types"},
    "jaxserve.memory": {"jaxserve.memory", "jaxserve.observation", "jaxserve.types"},
    "jaxserve.layers": {"jaxserve.layers", "pallas_kernels", "sharding"},
    "jaxserve.models": {
        "jaxserve.models", "jaxserve.layers", "jaxserve.types", "checkpoints.rules", "sharding",
    },
    "jaxserve.execution": {
        "jaxserve.execution", "jaxserve.models", "jaxserve.memory", "jaxserve.scheduler.sequence",
        "jaxserve.types", "pallas_kernels", "sharding", "checkpoints",
    },
    "jaxserve.constrained": {
        "jaxserve.constrained", "jaxserve.scheduler.sequence", "jaxserve.observation",
        "jaxserve.types",
    },
    "jaxserve.engine": {
        "jaxserve.engine", "jaxserve.constrained", "jaxserve.execution", "jaxserve.models",
        "jaxserve.memory", "jaxserve.scheduler", "jaxserve.messages", "jaxserve.config",
        "jaxserve.observation", "jaxserve.types", "pallas_kernels", "sharding", "checkpoints",
    },
    "jaxserve.entry": {
        "jaxserve", "jaxserve.entry", "jaxserve.engine.process", "jaxserve.messages",
        "jaxserve.config", "jaxserve.types", "jaxserve.metrics", "jaxserve.observation",
        "checkpoints",
    },
    "jaxserve.lang": {"jaxserve.lang", "jaxserve.entry", "jaxserve.config", "jaxserve.types"},
}  # fmt: skip

JAX_FREE = [
    "jaxserve.types", "jaxserve.config", "jaxserve.messages", "jaxserve.metrics",
    "jaxserve.observation", "jaxserve.engine.recorder",
    "jaxserve.scheduler.scheduler", "jaxserve.memory.page_pool", "jaxserve.memory.radix_cache",
    "jaxserve.constrained.compiler",
    "jaxserve.engine.process", "jaxserve.entry.cli", "jaxserve.entry.client", "jaxserve.entry.llm",
    "jaxserve.entry.http", "jaxserve.entry.grpc_server", "jaxserve.entry.serve",
    "jaxserve.entry.pull", "jaxserve.entry.demo", "jaxserve", "jaxserve.lang",
    "jaxserve.lang.runtime", "jaxserve.lang.endpoint",
]  # fmt: skip

# what runs only within a function that needs jax anyway
LAZY = {
    ("jaxserve.engine.process", "jaxserve.engine.start"),
    ("jaxserve.entry.convert", "jaxserve.models"),
    ("jaxserve.entry.convert", "sharding.mesh"),
}


def modules() -> list[tuple[str, pathlib.Path]]:
    found = []
    for package in sorted(OURS):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


def imports(path: pathlib.Path) -> set[str]:
    """Our own modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            # `from package import module` names that module, `from module import name` the former
            names |= {
                f"{node.module}.{alias.name}"
                if (ROOT / pathlib.Path(*node.module.split("."), f"{alias.name}.py")).exists()
                else node.module
                for alias in node.names
            }
    return {name for name in names if name.split(".")[0] in OURS}


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_downward(name, path):
    rules = [package for package in ALLOWED if within(name, {package})]
    if not rules:
        assert name in ("jaxserve", "jaxserve.__main__"), f"no rule says what {name} may import"
        return
    [package] = rules
    allowed = ALLOWED[package]
    if package == "jaxserve.entry":  # `jaxserve` itself is its version and lazy names
        exact, allowed = {"jaxserve"}, allowed - {"jaxserve"}
    else:
        exact = set()
    wrong = {
        other
        for other in imports(path) - exact
        if not within(other, allowed)
        and not any(name == user and within(other, {used}) for user, used in LAZY)
    }
    assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_code_that_steps_are_traced_from_is_part_of_what_kept_programs_are_found_by():
    # of what the runner imports, these decide what is sent to a step or told of it, not what it is
    others = {"checkpoints", "jaxserve.observation", "jaxserve.scheduler.sequence"}
    paths, waiting = dict(modules()), ["jaxserve.execution.runner"]
    missing = set()
    while waiting:
        name = waiting.pop()
        if name not in paths or within(name, others):
            continue
        path = paths.pop(name)
        waiting += imports(path)
        if not any(path.is_relative_to(ROOT / part) for part in TRACED):
            missing.add(name)
    assert not missing


def test_nothing_that_users_touch_imports_jax():
    script = (
        "import importlib, sys\n"
        f"for name in {JAX_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'jax', 'torch', 'transformers', 'flax'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
