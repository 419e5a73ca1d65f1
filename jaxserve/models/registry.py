"""Which code serves which model, and how one is built for a mesh, without its values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints.rules import Rule
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.types import ConfigError, UnsupportedModel
from sharding import place
from sharding.place import Distribution, Placement


@runtime_checkable
class Model(Protocol):
    """What the runner calls, inside its jitted steps; `llama.Llama` documents shapes."""

    def forward(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: Sequence[jax.Array],
        attend: llama.Attend,
        rotate_and_write: llama.RotateAndWrite | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]: ...

    def states(self, hidden: jax.Array) -> jax.Array: ...

    def logits(self, hidden: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """One model file: its module class, its weight rules, and the tensors that it leaves unread."""

    model: Callable[[ModelConfig, Placement, DTypeLike], nnx.Module]
    weights: tuple[Rule, ...]
    ignored: Callable[[ModelConfig], tuple[str, ...]]


_LLAMA = Family(llama.Llama, llama.WEIGHTS, llama.ignored)

# A new family: its file here, a line below, and its keys in `config.VARIANTS`.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def family(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`. Raises: UnsupportedModel naming its model_type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"config key model_type is {model_type!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model without its values. `abstract` fixes the order of the parameters for `merge`."""

    config: ModelConfig
    """Laid out for the mesh: what the rules' `combine` must be given."""
    placement: Placement
    abstract: Mapping[str, jax.ShapeDtypeStruct]
    """Path to shape, dtype and sharding of each parameter, such as `layers.3.attention.qkv`."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    """Regular expressions, matched whole, of checkpoint tensors that nothing needs."""
    graphdef: nnx.GraphDef[Any]
    distributions: Mapping[str, Distribution]

    @property
    def kv_heads(self) -> int:
        """Kv heads in each layer's pages."""
        return self.config.stored_kv_heads

    def merge(self, leaves: Sequence[jax.Array]) -> Model:
        """The model over these arrays, in `abstract`'s order. For use inside a jitted function."""
        assert len(leaves) == len(self.abstract), (len(leaves), len(self.abstract))
        return nnx.merge(self.graphdef, list(leaves))

    def random_params(self, seed: int) -> dict[str, jax.Array]:
        """Random values of sane scale, made on the devices: for timing without a checkpoint."""
        return place.random_params(self.abstract, self.distributions, seed)


def build(config: Mapping[str, Any], mesh: Mesh, layout: str, dtype: DTypeLike) -> BuiltModel:
    """Builds the model of a Hugging Face `config.json` for a mesh, without allocating anything.

    Raises: UnsupportedModel for a family or config key that nothing handles; ConfigError when the
    model does not divide over the mesh (naming sizes that do), or the layout is unknown.
    """
    found = family(config)
    try:
        placement = Placement(mesh, layout)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    plain = ModelConfig.from_hf(config)
    model_config = plain.for_mesh(placement.ways("kv_heads"), placement.ways("vocab"))
    model = nnx.eval_shape(lambda: found.model(model_config, placement, dtype))
    graphdef, state = nnx.split(model)
    abstract: dict[str, jax.ShapeDtypeStruct] = {}
    distributions: dict[str, Distribution] = {}
    for names, param in nnx.to_flat_state(state):
        path = ".".join(map(str, names))
        value = param.get_value()
        sharding = placement.sharding(param.get_metadata("axes"))
        abstract[path] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        distributions[path] = param.get_metadata("distribution")
    return BuiltModel(
        config=model_config,
        placement=placement,
        abstract=abstract,
        rules=found.weights,
        ignored=found.ignored(model_config),
        graphdef=graphdef,
        distributions=distributions,
    )
