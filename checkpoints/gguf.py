"""GGUF checkpoints under Hugging Face's names: tensors, config and tokenizer parts. Imports no jax.

The converter of llama.cpp (convert_hf_to_gguf.py) is what is undone here: its names, and for the
architecture `llama` the order of the query and key rows, which it changes from two halves to
adjacent pairs for its own rope.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from checkpoints.files import listed
from checkpoints.gguf_file import GgufFile, decode_blocks, decoding_pool, read_blocks, read_gguf
from checkpoints.source import TensorSpec
from jaxserve.types import CheckpointError, UnsupportedModel

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies: how the converter writes llama3 scaling. Becomes config."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a GGUF `general.architecture` was before the converter, and what that changed."""

    model_type: str
    class_name: str
    interleaved_rope: bool = False
    """Query and key rows were reordered."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

HANDLED_KEYS = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
"""Keys under the architecture's name that `hf_config` turns into config."""
NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "rope.scaling.finetuned": (True, False),
}
"""Keys that change nothing at these values; other values, and other keys, are refused by name."""

NO_TOKEN = (-1, 2**32 - 1)
"""How some writers say that there is no such token."""

SAMPLING_KEYS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class TokenizerParts(TypedDict):
    """What a GGUF file says of its tokenizer, by `tokenizer.ggml.*` key; None: it says nothing."""

    model: str
    """`gpt2`: byte-level BPE; `llama`: SentencePiece BPE with byte fallback."""
    pre: str | None
    """Name of the pre-tokenizer's splitting rules (`smollm`, `llama-bpe`, `qwen2`, ...)."""
    tokens: list[str]
    token_type: list[int] | None
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    scores: list[float] | None
    merges: list[str] | None
    """`left right`, best first."""
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    eom_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None
    chat_template: str | None


def tokenizer_parts(path: pathlib.Path | str) -> TokenizerParts:
    """The tokenizer that a GGUF file carries.

    Raises CheckpointError if it carries none or its lists disagree.
    """
    return parts_of(read_gguf(pathlib.Path(path)).metadata, path)


def parts_of(metadata: Mapping[str, Any], path: pathlib.Path | str) -> TokenizerParts:
    """`tokenizer_parts` of metadata that was read already; `path` is for the errors."""

    def get(key: str, kind: type, items: type | None = None) -> Any:
        value = metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, kind) or (
            items and not all(isinstance(item, items) for item in value)
        ):
            raise CheckpointError(
                f"{path}: tokenizer.{key} has the wrong type ({type(value).__name__})"
            )
        return value

    model, tokens = get("ggml.model", str), get("ggml.tokens", list, str)
    if model is None or not tokens:
        raise CheckpointError(
            f"{path}: carries no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)"
        )
    token_type, scores = get("ggml.token_type", list, int), get("ggml.scores", list, float)
    for key, values in (("token_type", token_type), ("scores", scores)):
        if values is not None and len(values) != len(tokens):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens"
            )

    def token_id(key: str) -> int | None:
        value = get(f"ggml.{key}_token_id", int)
        if value is None or value in NO_TOKEN:
            return None
        if not 0 <= value < len(tokens):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.{key}_token_id is {value}; there are {len(tokens)} tokens"
            )
        return value

    return TokenizerParts(
        model=model,
        pre=get("ggml.pre", str),
        tokens=tokens,
        token_type=token_type,
        scores=scores,
        merges=get("ggml.merges", list, str),
        bos_token_id=token_id("bos"),
        eos_token_id=token_id("eos"),
        eot_token_id=token_id("eot"),
        eom_token_id=token_id("eom"),
        unknown_token_id=token_id("unknown"),
        padding_token_id=token_id("padding"),
        add_bos_token=get("ggml.add_bos_token", bool),
        add_eos_token=get("ggml.add_eos_token", bool),
        add_space_prefix=get("ggml.add_space_prefix", bool),
        chat_template=get("chat_template", str),
    )


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name stays, and no rule will use it."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def architecture_of(metadata: Mapping[str, Any], path: pathlib.Path) -> Architecture:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: GGUF architecture {name!r} is not handled; handled: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


class GgufSource:
    """The `TensorSource` of a GGUF file: dequantised (to float32), rows in Hugging Face's order."""

    def __init__(self, path: pathlib.Path, file: GgufFile | None = None):
        file = file or read_gguf(path)
        config = hf_config(path, file)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        reordered = architecture_of(file.metadata, path).interleaved_rope
        self._heads_reordered = {"q": heads, "k": kv_heads} if reordered else {}
        self._tensors = {
            hf_name(name): (name, tensor)
            for name, tensor in file.tensors.items()
            if name != ROPE_FACTORS
        }
        self._pool = decoding_pool()

    def names(self) -> Mapping[str, TensorSpec]:
        return {name: tensor.spec for name, (_, tensor) in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        stored_name, tensor = self._tensors[name]
        blocks = read_blocks(tensor, stored_name)
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", stored_name)
        if match and (heads := self._heads_reordered.get(match[1])):
            num_rows = tensor.shape[0]
            order = halves_from_pairs(num_rows, heads, f"{tensor.path}: tensor {stored_name!r}")
            # Whole rows move, still quantised; a bias is one row here, whose numbers move.
            blocks = blocks.reshape(num_rows, -1)[order]
        return decode_blocks(blocks, tensor, stored_name, self._pool)

    def close(self) -> None:
        self._pool.shutdown()


def halves_from_pairs(num_rows: int, num_heads: int, what: str) -> np.ndarray:
    """Row order that undoes the converter's: in each head the even rows, then the odd ones."""
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{what} has {num_rows} rows, which {num_heads} heads of even width don't divide"
        )
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def hf_config(path: pathlib.Path, file: GgufFile) -> dict[str, Any]:
    """What Hugging Face's `config.json` would say of this file.

    Raises: UnsupportedModel for an architecture or a key that nothing handles; CheckpointError for
    a missing value, or rope factors that no llama3 scaling explains.
    """
    metadata, tensors = file
    architecture = architecture_of(metadata, path)
    prefix = metadata["general.architecture"] + "."
    values = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    for key, value in values.items():
        if key not in HANDLED_KEYS and value not in NEUTRAL_KEYS.get(key, ()):
            raise UnsupportedModel(f"{path}: nothing handles {prefix}{key} = {value!r}")

    def number(key: str, default: Any = None, kind: type = int) -> Any:
        value = values.get(key, default)
        if value is None:
            raise CheckpointError(f"{path}: {prefix}{key} is missing")
        if type(value) is not kind or not 0 < value < math.inf:
            raise UnsupportedModel(
                f"{path}: {prefix}{key} is {value!r}; handled: one positive {kind.__name__}"
            )
        return value

    theta = number("rope.freq_base", 10000.0, kind=float)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: has no tensor 'token_embd.weight' of two dimensions")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{path}: {prefix}{key} is {values[key]}, the heads are {head_dim} wide"
            )
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(path, file, values, head_dim, theta),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if values.get("attention.sliding_window"):
        config["sliding_window"] = number("attention.sliding_window")
        if architecture.model_type == "llama":  # of this architecture only Mistral has one
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        else:
            config["use_sliding_window"] = True
    for key in ("bos", "eos"):
        if (token := _token_id(metadata, key)) is not None:
            config[f"{key}_token_id"] = token
    return config


def hf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `generation_config.json` would say: end-of-text ids, and sampling defaults if stated."""
    generation: dict[str, Any] = {}
    ends = [_token_id(metadata, key) for key in ("eos", "eot", "eom")]
    if stated := list(dict.fromkeys(token for token in ends if token is not None)):
        generation["eos_token_id"] = stated if len(stated) > 1 else stated[0]
    if (bos := _token_id(metadata, "bos")) is not None:
        generation["bos_token_id"] = bos
    sampling = {
        name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()
    }
    generation |= {name: value for name, value in sampling.items() if value is not None}
    return generation


def _token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return None if token in NO_TOKEN else token


def _rope_scaling(
    path: pathlib.Path, file: GgufFile, values: Mapping[str, Any], head_dim: int, theta: float
) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if kind != "none":
            raise UnsupportedModel(f"{path}: has both {ROPE_FACTORS} and rope scaling {kind!r}")
        with decoding_pool() as pool:
            divisors = decode_blocks(
                read_blocks(factors, ROPE_FACTORS), factors, ROPE_FACTORS, pool
            )
        return llama3_scaling(divisors.reshape(-1).tolist(), head_dim, theta, path)
    if kind == "none":
        return None
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    if factor is None:
        raise CheckpointError(f"{path}: rope scaling {kind!r} states no factor")
    scaling = {"rope_type": kind, "factor": factor}
    for key, name in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.attn_factor", "attention_factor"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if key in values:
            scaling[name] = values[key]
    return scaling


def llama3_scaling(
    divisors: Sequence[float], head_dim: int, theta: float, path: pathlib.Path
) -> dict[str, Any] | None:
    """The llama3 scaling that gives these divisors of the rope frequencies; None if all are 1.

    A frequency that turns t times within the original context keeps its value from t >= high on, is
    divided by `factor` up to t <= low, and in between by 1 / (s + (1 - s) / factor), s = (t - low)
    / (high - low). Only the ratios of context, low and high show in the divisors: low is taken as
    1, as in all published models.
    Raises: CheckpointError if no such scaling gives the divisors to 1 part in 10,000.
    """
    if len(divisors) != head_dim // 2 or not all(math.isfinite(d) and d > 0 for d in divisors):
        raise CheckpointError(
            f"{path}: {ROPE_FACTORS} has {len(divisors)} values; expected {head_dim // 2} "
            "positive ones"
        )
    factor = max(divisors)
    if factor == min(divisors) == 1:
        return None
    turns_per_position = [
        theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2)
    ]
    between = [
        (turns, (1 / d - 1 / factor) / (1 - 1 / factor))
        for turns, d in zip(turns_per_position, divisors, strict=True)
        if 1 + 1e-6 < d < factor * (1 - 1e-6)
    ]
    candidates = [(4.0, 8192.0)]  # Llama 3.1 to 3.3
    if len(between) >= 2:
        (turns_a, s_a), (turns_b, s_b) = between[0], between[-1]
        slope = (s_a - s_b) / (turns_a - turns_b)  # context / (high - 1)
        span = 1 / (slope * turns_a - s_a)  # high - 1
        candidates.append((1 + span, slope * span))
    for high, context in candidates:
        if not (math.isfinite(context) and high > 1 and round(context) > 0):
            continue
        smooth = [
            min(1.0, max(0.0, (turns * round(context) - 1) / (high - 1)))
            for turns in turns_per_position
        ]
        expected = [1 / (s + (1 - s) / factor) for s in smooth]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, divisors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": round(context),
            }
    raise CheckpointError(
        f"{path}: no llama3 scaling gives the divisors in {ROPE_FACTORS}: "
        f"{listed(map(str, divisors))}"
    )
