"""How a family's checkpoint tensors become its parameters: a table of `Rule`, at the end of each
`models/<family>.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter, made from one or more checkpoint tensors.

    `{i}` in `target` and `sources` stands for the layer. `combine(tensors, config)` gets the source
    tensors in order, as numpy arrays in their stored dtype, and the model's config, and returns the
    array of the parameter's exact shape. `when(config)` false: the rule does not apply. A source
    name may occur in several rules only if `shared` says so.
    """

    target: str
    sources: tuple[str, ...]
    combine: Callable[[Sequence[np.ndarray], Any], np.ndarray]
    when: Callable[[Any], bool] = lambda config: True
    shared: bool = False
