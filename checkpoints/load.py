"""Fills a model's parameters from a checkpoint: each tensor used once, each parameter filled."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from checkpoints.files import listed
from checkpoints.resolve import ModelFiles, open_source
from checkpoints.rules import Rule
from checkpoints.source import FLOAT_DTYPES, TensorSource, TensorSpec
from jaxserve.types import CheckpointError

Progress = Callable[[int, int], None]
"""Called with the bytes placed so far and the bytes of all parameters."""


def load_weights(
    files: ModelFiles,
    params: Mapping[str, jax.ShapeDtypeStruct],
    rules: Sequence[Rule],
    config: Any,
    ignored: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """The parameters of `params`, from whichever format the model's files have.

    See `load_params`.
    """
    if files.kind == "orbax":
        from checkpoints import orbax  # half a second of imports that the other formats don't need

        return orbax.restore(files.path, params)
    source = open_source(files)
    try:
        return load_params(source, rules, params, config, ignored, progress)
    finally:
        source.close()


def load_params(
    source: TensorSource,
    rules: Sequence[Rule],
    params: Mapping[str, jax.ShapeDtypeStruct],
    config: Any,
    ignored: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Reads, combines, casts and places one parameter after the other; in the order of `params`.

    `params` has each parameter's shape, dtype and sharding. `ignored` are regular expressions,
    matched whole, of tensors that need no rule. `{i}` in rules runs over `config.num_layers`. On
    the host live the tensors of one parameter, and the one before while it is on its way to the
    device.
    Raises: CheckpointError before anything is read if rules, tensors and parameters don't match,
    listing all of what is left on each side; while reading, for shapes that don't fit and files
    that can't be read.
    """
    plan = _plan(source.names(), rules, params, config, ignored)
    total = sum(spec.size * spec.dtype.itemsize for spec in params.values())
    done = 0
    loaded: dict[str, jax.Array] = {}
    previous: jax.Array | None = None
    for target, rule, names in plan:
        host = _combined(source, target, rule, names, params[target], config)
        placed = place(host, params[target])
        del host
        if previous is not None:
            previous.block_until_ready()
        previous = loaded[target] = placed
        done += placed.size * placed.dtype.itemsize
        if progress is not None:
            progress(done, total)
    jax.block_until_ready(previous)
    return {target: loaded[target] for target in params}


def place(host: np.ndarray, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """A host array on the devices of `spec.sharding`, each of which gets its own part only."""
    sharding = spec.sharding
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _plan(
    names: Mapping[str, TensorSpec],
    rules: Sequence[Rule],
    params: Mapping[str, jax.ShapeDtypeStruct],
    config: Any,
    ignored: Sequence[str],
) -> list[tuple[str, Rule, list[str]]]:
    """(parameter, its rule, its tensors), in the order of the tensors in the checkpoint."""
    plan: dict[str, tuple[Rule, list[str]]] = {}
    used_by: dict[str, tuple[str, Rule]] = {}
    faults: list[str] = []
    for target, rule, sources in _expanded(rules, config):
        if target in plan:
            faults.append(f"two rules make parameter {target}")
        plan[target] = (rule, sources)
        for name in sources:
            if name in used_by and not (rule.shared or used_by[name][1].shared):
                faults.append(f"tensor {name} is used for both {used_by[name][0]} and {target}")
            used_by[name] = (target, rule)
    missing = {
        target: absent
        for target, (_, sources) in plan.items()
        if (absent := [n for n in sources if n not in names])
    }
    unused = [
        name
        for name in names
        if name not in used_by and not any(re.fullmatch(p, name) for p in ignored)
    ]
    strange = [
        f"{name} is {names[name].dtype.name}"
        for name in used_by
        if name in names and names[name].dtype not in FLOAT_DTYPES
    ]
    if missing:
        lacking = listed(
            f"{target} (lacks {listed(absent, 3)})" for target, absent in missing.items()
        )
        faults.append(f"{len(missing)} parameters unfilled: {lacking}")
    if unruled := [target for target in params if target not in plan]:
        faults.append(f"{len(unruled)} parameters no rule fills: {listed(unruled)}")
    if unknown := [target for target in plan if target not in params]:
        faults.append(
            f"{len(unknown)} rules for parameters that the model does not have: {listed(unknown)}"
        )
    if unused:
        faults.append(
            f"{len(unused)} tensors unused: {listed(f'{name} {names[name]}' for name in unused)}"
        )
    if strange:
        allowed = ", ".join(dtype.name for dtype in FLOAT_DTYPES)
        faults.append(f"{len(strange)} tensors are not of {allowed}: {listed(strange)}")
    if faults:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(faults))
    order = {name: position for position, name in enumerate(names)}
    return sorted(
        ((target, rule, sources) for target, (rule, sources) in plan.items()),
        key=lambda entry: min((order[name] for name in entry[2]), default=0),
    )


def _expanded(rules: Sequence[Rule], config: Any) -> list[tuple[str, Rule, list[str]]]:
    expanded = []
    for rule in rules:
        if not rule.when(config):
            continue
        layers = range(config.num_layers) if "{i}" in rule.target else [None]
        for layer in layers:
            sources = [name.replace("{i}", str(layer)) for name in rule.sources]
            expanded.append((rule.target.replace("{i}", str(layer)), rule, sources))
    return expanded


def _combined(
    source: TensorSource,
    target: str,
    rule: Rule,
    names: Sequence[str],
    spec: jax.ShapeDtypeStruct,
    config: Any,
) -> np.ndarray:
    """The parameter's array on the host, contiguous, in its dtype."""
    tensors = [source.read(name) for name in names]
    made_from = ", ".join(
        f"{name} {TensorSpec(t.shape, t.dtype)}" for name, t in zip(names, tensors, strict=True)
    )
    try:
        combined = rule.combine(tensors, config)
    except (ValueError, IndexError) as error:
        raise CheckpointError(
            f"parameter {target} of shape {tuple(spec.shape)} can't be made from {made_from}: "
            f"{error}"
        ) from error
    if combined.shape != tuple(spec.shape):
        raise CheckpointError(
            f"parameter {target} has shape {tuple(spec.shape)}, but {made_from} make "
            f"{combined.shape}"
        )
    return np.ascontiguousarray(combined, dtype=spec.dtype)
