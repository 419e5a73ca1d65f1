"""Tensor parallelism over eight CPU devices: same logits, few exchanges, no weight copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jax
import tiny_models

from jaxserve.models import registry
from jaxserve.types import ConfigError

SMOLLM2_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}


def compiled_text(built, num_tokens):
    token_ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    leaves = list(built.abstract.values())
    return tiny_jax.whole(built).lower(leaves, token_ids).compile().as_text()


# llama2 has a kv head for each of 8 devices; llama3 and qwen3 have 2, so that 4 and 8 repeat them.
@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama2", "llama3", "llama-bias-linear", "qwen2", "qwen3"])
def test_logits_are_the_same_over_devices(name, tensor):
    one, many = tiny_jax.logits(name), tiny_jax.logits(name, tensor)
    # float32 sums in another order
    np.testing.assert_allclose(many, one, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(many.argmax(-1), one.argmax(-1))


def test_whole_vocab_layout_gives_the_same_logits():
    many = tiny_jax.logits("llama3", 4, "tensor-whole-vocab")
    np.testing.assert_allclose(many, tiny_jax.logits("llama3"), rtol=0, atol=2e-5)


def test_kv_heads_are_repeated_for_devices_beyond_them():
    built, leaves = tiny_jax.build("llama3", 8)
    assert built.kv_heads == 8
    qkv = dict(zip(built.abstract, leaves, strict=True))["layers.0.attention.qkv"]
    assert qkv.shape == (8, 3, 8, 64)  # one query head, k and v on each device
    assert qkv.addressable_shards[0].data.shape == (1, 3, 8, 64)
    first_k, fourth_k, fifth_k = np.asarray(qkv[:, 1])[[0, 3, 4]]
    np.testing.assert_array_equal(first_k, fourth_k)
    assert not np.array_equal(first_k, fifth_k)


def test_vocabulary_is_padded_to_divide_and_padding_is_never_seen():
    built, leaves = tiny_jax.build("llama2", 8)
    assert built.abstract["embedding"].shape[0] == 136
    assert built.abstract["head"].shape[0] == 136
    assert tiny_jax.whole(built)(leaves, jnp.arange(4)).shape == (4, 131)


def test_heads_that_do_not_divide_name_sizes_that_do():
    config = {**tiny_models.CONFIGS["llama2"], **SMOLLM2_HEADS, "intermediate_size": 1536}
    with pytest.raises(ConfigError, match=r"tensor is 2; allowed for this model: 1, 3 \(9 query"):
        registry.build(config, tiny_jax.mesh(2), "tensor", jnp.float32)
    assert registry.build(config, tiny_jax.mesh(3), "tensor", jnp.float32).kv_heads == 3
    config["intermediate_size"] = 1000
    with pytest.raises(ConfigError, match=r"allowed for this model: 1 \("):
        registry.build(config, tiny_jax.mesh(3), "tensor", jnp.float32)


@pytest.mark.parametrize("name", ["llama3", "qwen3-bias-window"])
def test_a_layer_sums_over_devices_twice(name):
    built, _ = tiny_jax.build(name, 8)
    text = compiled_text(built, num_tokens=40)
    count = {
        kind: len(re.findall(rf" {kind}(?:-start)?\(", text))
        for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    }
    # one more for the embedding; the logits are gathered for the caller
    assert count == {
        "all-reduce": 2 * built.config.num_layers + 1,
        "all-gather": 1,
        "all-to-all": 0,
        "collective-permute": 0,
    }


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 16, 200])
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_no_step_copies_or_transposes_a_weight(name, num_tokens, tensor):
    built, _ = tiny_jax.build(name, tensor)
    text = compiled_text(built, num_tokens)
    moved = re.findall(r'.* (?:copy|transpose)\(.*op_name="leaves\[.*', text)
    assert not moved, moved
    if num_tokens == 1:
        sizes = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        largest = max((np.prod([int(n) for n in size.split(",")]) for size in sizes), default=0)
        assert largest < 64 * 64 // tensor
