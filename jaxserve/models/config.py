"""A model's shape and switches, read from Hugging Face's `config.json`. Imports no jax.

A key that nothing here handles is refused by name: a model that would silently compute something
else is worse than one that does not load. Sources of the defaults: transformers 5's
`configuration_<family>.py`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxserve.types import ConfigError, UnsupportedModel

# Keys that say nothing about what the model computes at inference.
HARMLESS_KEYS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "rms_norm_eps",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "vocab_size",
    ]
)

# Keys that are fine at one value only, because nothing here does the other thing.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu", "swish"),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}

SHAPE_KEYS = frozenset(
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
    ]
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a context longer than that first trained on."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything a family's code needs to know. Counts are of the whole model, whatever the mesh.

    The last two fields say how parameters and KV pages are laid out on the mesh; `for_mesh` sets
    them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    """In layers that slide a query sees its own token and the `sliding_window - 1` before."""
    sliding_layers: tuple[bool, ...]
    """Which layers slide: all False without a window."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    stored_kv_heads: int
    """`num_kv_heads`, or more when each is repeated so that every device has one."""
    stored_vocab_size: int
    """Rows of the embedding as stored: `vocab_size`, padded to divide over the mesh."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a `config.json`.

        Raises: UnsupportedModel naming the key, its value and what is allowed.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in VARIANTS:
            raise _refuse("model_type", model_type, ", ".join(sorted(VARIANTS)))
        return _read(config, VARIANTS[model_type])

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens, None where it sees everything before it."""
        return self.sliding_window if self.sliding_layers[layer] else None

    def for_mesh(self, tensor: int, vocab_ways: int = 1) -> "ModelConfig":
        """The same model, laid out for `tensor` devices with its vocabulary over `vocab_ways`.

        Raises: ConfigError as `shard_heads` does.
        """
        return dataclasses.replace(
            self,
            stored_kv_heads=shard_heads(self, tensor),
            stored_vocab_size=math.ceil(self.vocab_size / vocab_ways) * vocab_ways,
        )


def shard_heads(config: ModelConfig, tensor: int) -> int:
    """Kv heads as stored when `tensor` devices split the model: at least one for each.

    With fewer kv heads than devices each is repeated, so that a device holds the kv head of its
    query heads.
    Raises: ConfigError naming the sizes that work.
    """

    def stored(ways: int) -> int | None:
        kv_heads = max(config.num_kv_heads, ways)
        divides = config.num_kv_heads % ways == 0 or ways % config.num_kv_heads == 0
        divides = divides and config.num_heads % kv_heads == 0
        return kv_heads if divides and config.intermediate_size % ways == 0 else None

    kv_heads = stored(tensor) if tensor >= 1 else None
    if kv_heads is None:
        works = [ways for ways in range(1, config.num_heads + 1) if stored(ways)]
        raise ConfigError(
            f"tensor is {tensor}; allowed for this model: {', '.join(map(str, works))} "
            f"({config.num_heads} query heads, {config.num_kv_heads} kv heads and "
            f"width {config.intermediate_size} must divide)"
        )
    return kv_heads


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a `model_type` means by its config: its extra keys, its defaults, its fixed switches."""

    architecture: str
    """Class name in `architectures`, when the config has that key."""
    keys: frozenset[str] = frozenset()
    """Keys of this family beyond those that all have."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    qkv_bias: bool | None = None
    """None: `attention_bias` decides, for the output projection too."""
    qk_norm: bool = False
    window: Literal["never", "all", "by_layer"] = "never"
    """by_layer: `use_sliding_window`, `max_window_layers` or `layer_types` decide."""


_WINDOW_KEYS = frozenset(
    ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
)

# One entry for each model_type; its code is in `registry.FAMILIES`.
VARIANTS: Mapping[str, Variant] = {
    "llama": Variant("LlamaForCausalLM", keys=frozenset(("attention_bias", "mlp_bias"))),
    "mistral": Variant(
        "MistralForCausalLM",
        keys=frozenset(("sliding_window",)),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        window="all",
    ),
    "qwen2": Variant(
        "Qwen2ForCausalLM",
        keys=_WINDOW_KEYS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
        window="by_layer",
    ),
    "qwen3": Variant(
        "Qwen3ForCausalLM",
        keys=_WINDOW_KEYS | {"attention_bias"},
        defaults={
            "head_dim": 128,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        qk_norm=True,
        window="by_layer",
    ),
}


def _refuse(key: str, value: Any, allowed: str) -> UnsupportedModel:
    return UnsupportedModel(f"config key {key} is {value!r}; allowed: {allowed}")


def _check_keys(config: Mapping[str, Any], variant: Variant) -> None:
    known = HARMLESS_KEYS | SHAPE_KEYS | ONLY_VALUES.keys() | variant.keys
    # Families without these switches are sometimes written with them, off.
    known |= {key for key in ("attention_bias", "mlp_bias") if config.get(key) is False}
    # A null key is an absent one, in every config.json.
    unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
    if unknown:
        raise UnsupportedModel(
            f"config of {config.get('model_type')!r} has keys that nothing here handles: "
            + ", ".join(f"{key}={config[key]!r}" for key in unknown)
        )
    for key, allowed in ONLY_VALUES.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise _refuse(key, config[key], " or ".join(repr(value) for value in allowed))
    architectures = config.get("architectures") or [variant.architecture]
    if variant.architecture.lower() not in (str(name).lower() for name in architectures):
        raise _refuse("architectures", architectures, variant.architecture)


def _read(config: Mapping[str, Any], variant: Variant) -> ModelConfig:
    _check_keys(config, variant)

    def get(key: str) -> Any:
        value = config.get(key)
        return variant.defaults.get(key) if key not in config else value

    def whole(key: str, default: int | None = None) -> int:
        value = get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(key, value, "an integer, 1 or more")
        return value

    def switch(key: str) -> bool:
        value = get(key)
        if value is not None and not isinstance(value, bool):
            raise _refuse(key, value, "true or false")
        return bool(value)

    num_heads = whole("num_attention_heads")
    num_kv_heads = whole("num_key_value_heads", num_heads)
    hidden_size = whole("hidden_size")
    num_layers = whole("num_hidden_layers")
    vocab_size = whole("vocab_size")
    max_positions = whole("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise _refuse("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} query heads")
    if get("head_dim") is None and hidden_size % num_heads:
        raise _refuse(
            "hidden_size", hidden_size, f"a multiple of {num_heads} heads, or give head_dim"
        )
    head_dim = whole("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise _refuse("head_dim", head_dim, "an even number")
    theta, scaling = _read_rope(config, max_positions)
    sliding_window, sliding_layers = _read_window(config, variant, num_layers)
    attention_bias = switch("attention_bias")
    return ModelConfig(
        model_type=config["model_type"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        qkv_bias=attention_bias if variant.qkv_bias is None else variant.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=switch("mlp_bias"),
        qk_norm=variant.qk_norm,
        tie_word_embeddings=switch("tie_word_embeddings"),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocab_size)), None),
        stored_kv_heads=num_kv_heads,
        stored_vocab_size=vocab_size,
    )


def _positive(key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise _refuse(key, value, "a number over 0")
    return float(value)


def _token_ids(config: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise _refuse(key, value, "a token id, a list of them, or null")
    # Some checkpoints name an id that their vocabulary does not have (-1, for "none"): it can never
    # be sampled.
    return tuple(token for token in ids if 0 <= token < vocab_size)


def _read_rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters`, or `rope_theta` and `rope_scaling` as it was before."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(name)
    rope = {} if rope is None else rope
    if config.get("rope_scaling") not in (None, rope):
        raise _refuse("rope_scaling", config["rope_scaling"], "null next to rope_parameters")
    if not isinstance(rope, Mapping):
        raise _refuse(name, rope, "an object or null")
    theta = _positive("rope_theta", rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    needs: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    if kind not in needs:
        raise _refuse(f"{name}.rope_type", kind, ", ".join(needs))
    allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needs[kind]}
    allowed |= {"original_max_position_embeddings"} if kind == "llama3" else set()
    unknown = sorted(key for key, value in rope.items() if key not in allowed and value is not None)
    if unknown:
        raise UnsupportedModel(
            f"config key {name} of type {kind} has keys that nothing here handles: "
            + ", ".join(unknown)
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _refuse(f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
    if kind == "default":
        return theta, None
    factor, *low_high = (_positive(f"{name}.{key}", rope.get(key)) for key in needs[kind])
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    key = "original_max_position_embeddings"
    original = int(_positive(f"{name}.{key}", rope.get(key, max_positions)))
    low, high = low_high
    if high <= low:
        raise _refuse(f"{name}.high_freq_factor", rope["high_freq_factor"], "over low_freq_factor")
    return theta, RopeScaling("llama3", factor, low, high, original)


def _read_window(
    config: Mapping[str, Any], variant: Variant, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Window in tokens and which layers have it, as transformers' config classes decide it."""
    nowhere = (None, (False,) * num_layers)
    if variant.window == "never":
        return nowhere
    window = config.get("sliding_window", variant.defaults.get("sliding_window"))
    if variant.window == "by_layer" and not config.get("use_sliding_window"):
        window = None
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or window < 1
    ):
        raise _refuse("sliding_window", window, "an integer, 1 or more, or null")
    if variant.window == "all":
        return nowhere if window is None else (window, (True,) * num_layers)
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", variant.defaults.get("max_window_layers"))
        if isinstance(first, bool) or not isinstance(first, int):
            raise _refuse("max_window_layers", first, "an integer")
        slides = tuple(window is not None and i >= first for i in range(num_layers))
    else:
        slides = _read_layer_types(layer_types, num_layers)
        if any(slides) and window is None:
            raise _refuse("layer_types", layer_types, "full_attention without use_sliding_window")
    return (window, slides) if any(slides) else nowhere


def _read_layer_types(layer_types: Sequence[str], num_layers: int) -> tuple[bool, ...]:
    kinds = {"full_attention": False, "sliding_attention": True}
    if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
        raise _refuse("layer_types", layer_types, f"a list of {num_layers} names")
    for kind in layer_types:
        if kind not in kinds:
            raise _refuse("layer_types", kind, ", ".join(kinds))
    return tuple(kinds[kind] for kind in layer_types)
