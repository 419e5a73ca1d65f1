"""The Llama family: Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from checkpoints.rules import Rule
from jaxserve.layers import embedding, rope
from jaxserve.layers.attention import Attention, RotateAndWrite
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import Residual, RMSNorm
from jaxserve.layers.parameter import parameter
from jaxserve.layers.stack import run_layers
from jaxserve.models.config import ModelConfig
from sharding.place import Placement


@runtime_checkable
class Attend(Protocol):
    """Writes a layer's new keys and values to its pages, where they are given, then attends; the
    runner brings it."""

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        kv_pages: jax.Array,
        *,
        sliding_window: int | None,
        sm_scale: float,
    ) -> tuple[Float[Array, "T N H"], jax.Array]: ...


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, placement: Placement, dtype: DTypeLike):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(width, "embed", eps, dtype)
        self.attention = Attention(
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.stored_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            placement=placement,
            dtype=dtype,
        )
        self.mlp_norm = RMSNorm(width, "embed", eps, dtype)
        self.mlp = GatedMLP(
            width, config.intermediate_size, bias=config.mlp_bias, placement=placement, dtype=dtype
        )


class Llama(nnx.Module):
    """The whole model: built abstractly by `registry.build`, run inside one `jax.jit`."""

    def __init__(self, config: ModelConfig, placement: Placement, dtype: DTypeLike):
        self.config = config
        self.placement = placement
        width, vocab = config.hidden_size, config.stored_vocab_size
        self.embedding = parameter((vocab, width), ("vocab", "embed"), dtype, fan_in=width)
        self.layers = nnx.List([Block(config, placement, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(width, "embed", config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.head = (
            None if tied else parameter((vocab, width), ("vocab", "embed"), dtype, fan_in=width)
        )

    def forward(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        kv: Sequence[jax.Array],
        attend: Attend,
        rotate_and_write: RotateAndWrite | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[jax.Array, ...]]:
        """Runs the layers over a step's tokens; returns hidden states and each layer's pages.

        The hidden states are those before the last norm: `logits` applies it, to the rows that need
        it.
        """
        hidden = embedding.embed(token_ids, self.embedding.get_value())
        hidden = self.placement.constrain(hidden, ("tokens", "embed"))
        cos, sin = rope.rope_tables(positions, _frequencies(self.config))
        sm_scale = self.config.head_dim**-0.5

        def step(
            layer: Block, stream: Residual, pages: jax.Array, window: int | None
        ) -> tuple[Residual, jax.Array]:
            stream, x = layer.attention_norm.of_sum(stream)
            q, k, v, pages = layer.attention.project(
                x, cos, sin, pages, rotate_and_write, sliding_window=window
            )
            o, pages = attend(q, k, v, pages, sliding_window=window, sm_scale=sm_scale)
            stream = layer.attention.output(stream, o, layer.mlp_norm)
            stream, x = layer.mlp_norm.of_sum(stream)
            return layer.mlp(stream, x), pages

        stream = Residual(hidden)
        windows = [self.config.window(index) for index in range(self.config.num_layers)]
        stream, kv = run_layers(self.layers, stream, kv, windows, step)
        return stream.sum(), kv

    def states(self, hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
        """Rows of `forward`'s hidden states after the last norm: what an embedding is made of."""
        return self.norm(hidden)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits over the true vocabulary, float32, of rows of `forward`'s hidden states."""
        x = self.states(hidden)
        head = self.embedding if self.head is None else self.head
        return embedding.logits(x, head.get_value(), self.config.vocab_size, self.placement)


def _frequencies(config: ModelConfig) -> np.ndarray:
    freqs = rope.frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    return rope.stretch_llama3(
        freqs,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_context=scaling.original_max_position_embeddings,
    )


def _grouped(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    """Rows of q, k, v to [K, G+2, H, ...]: by stored kv head, its queries, its key, its value."""
    q, k, v = tensors
    kv_heads, width = config.stored_kv_heads, config.head_dim
    q = q.reshape(kv_heads, -1, width, *q.shape[1:])
    repeats = kv_heads // config.num_kv_heads
    k, v = (
        np.repeat(x.reshape(config.num_kv_heads, 1, width, *x.shape[1:]), repeats, axis=0)
        for x in (k, v)
    )
    return np.concatenate((q, k, v), axis=1)


def _o(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return tensors[0].reshape(config.hidden_size, config.stored_kv_heads, -1, config.head_dim)


def _paired(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return np.stack(tensors, axis=1)


def _same(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return tensors[0]


def _vocab_rows(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    padding = config.stored_vocab_size - config.vocab_size
    return np.pad(tensors[0], ((0, padding), (0, 0))) if padding else tensors[0]


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that the model has no use for: old buffers, a tied embedding's copy."""
    return (*IGNORED, r"lm_head\.weight") if config.tie_word_embeddings else IGNORED


IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.self_attn\.(masked_bias|bias)")

_ATTENTION = "model.layers.{i}.self_attn."
_MLP = "model.layers.{i}.mlp."


def _has(field: str) -> Any:
    return lambda config: getattr(config, field)


WEIGHTS: tuple[Rule, ...] = (
    Rule("embedding", ("model.embed_tokens.weight",), _vocab_rows),
    Rule("layers.{i}.attention_norm.scale", ("model.layers.{i}.input_layernorm.weight",), _same),
    Rule(
        "layers.{i}.attention.qkv",
        tuple(f"{_ATTENTION}{name}_proj.weight" for name in "qkv"),
        _grouped,
    ),
    Rule(
        "layers.{i}.attention.qkv_bias",
        tuple(f"{_ATTENTION}{name}_proj.bias" for name in "qkv"),
        _grouped,
        when=_has("qkv_bias"),
    ),
    Rule(
        "layers.{i}.attention.q_norm.scale",
        (f"{_ATTENTION}q_norm.weight",),
        _same,
        when=_has("qk_norm"),
    ),
    Rule(
        "layers.{i}.attention.k_norm.scale",
        (f"{_ATTENTION}k_norm.weight",),
        _same,
        when=_has("qk_norm"),
    ),
    Rule("layers.{i}.attention.o", (f"{_ATTENTION}o_proj.weight",), _o),
    Rule("layers.{i}.attention.o_bias", (f"{_ATTENTION}o_proj.bias",), _same, when=_has("o_bias")),
    Rule("layers.{i}.mlp_norm.scale", ("model.layers.{i}.post_attention_layernorm.weight",), _same),
    Rule("layers.{i}.mlp.gate_up", (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"), _paired),
    Rule(
        "layers.{i}.mlp.gate_up_bias",
        (f"{_MLP}gate_proj.bias", f"{_MLP}up_proj.bias"),
        _paired,
        when=_has("mlp_bias"),
    ),
    Rule("layers.{i}.mlp.down", (f"{_MLP}down_proj.weight",), _same),
    Rule("layers.{i}.mlp.down_bias", (f"{_MLP}down_proj.bias",), _same, when=_has("mlp_bias")),
    Rule("norm.scale", ("model.norm.weight",), _same),
    Rule(
        "head",
        ("lm_head.weight",),
        _vocab_rows,
        when=lambda config: not config.tie_word_embeddings,
    ),
)
