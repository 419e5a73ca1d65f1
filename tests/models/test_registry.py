"""Building a model: nothing allocated, a fixed order of parameters, random values of sane scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jax
import tiny_models

from jaxserve.models import registry
from jaxserve.models.config import VARIANTS
from jaxserve.types import ConfigError, UnsupportedModel


def test_every_variant_has_a_family():
    assert registry.FAMILIES.keys() == VARIANTS.keys()


def test_a_70b_model_is_built_without_being_allocated():
    config = {
        **tiny_models.CONFIGS["llama3"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    built = registry.build(config, tiny_jax.mesh(8), "tensor", jnp.bfloat16)
    assert sum(leaf.size for leaf in built.abstract.values()) == 70_553_706_496
    assert {leaf.dtype for leaf in built.abstract.values()} == {jnp.dtype("bfloat16")}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in built.abstract.values())


def test_parameters_come_in_a_fixed_order():
    first, again = (
        registry.build(tiny_models.CONFIGS["qwen3"], tiny_jax.mesh(1), "tensor", jnp.float32)
        for _ in range(2)
    )
    assert list(first.abstract) == list(again.abstract)
    assert "layers.2.attention.q_norm.scale" in first.abstract
    assert len(first.abstract) == 2 + 3 * 8


def test_random_parameters_give_varied_finite_logits():
    built, _ = tiny_jax.build("llama3")
    params = built.random_params(0)
    assert np.all(np.asarray(params["layers.0.mlp_norm.scale"]) == 1.0)
    logits = np.asarray(tiny_jax.whole(built)(list(params.values()), jnp.arange(32)))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0
    assert len(set(logits.argmax(-1))) > 8


def test_random_parameters_follow_the_seed_and_not_the_mesh():
    one, two = tiny_jax.build("llama2")[0], tiny_jax.build("llama2", 2)[0]
    params, spread, other = one.random_params(3), two.random_params(3), one.random_params(4)
    for path, value in params.items():
        assert spread[path].sharding == two.abstract[path].sharding
        if value.shape == spread[path].shape:
            np.testing.assert_array_equal(value, spread[path])
    assert not np.array_equal(params["layers.0.mlp.down"], other["layers.0.mlp.down"])
    assert not np.array_equal(params["layers.0.mlp.down"], params["layers.1.mlp.down"])


def test_bfloat16_stays_near_float32():
    config = tiny_models.CONFIGS["qwen3"]
    built = registry.build(config, tiny_jax.mesh(1), "tensor", jnp.bfloat16)
    leaves = [leaf.astype(jnp.bfloat16) for leaf in tiny_jax.build("qwen3")[1]]
    logits = tiny_jax.whole(built)(leaves, jnp.asarray(tiny_models.token_ids(config)))
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa through 3 layers, logits of size 1
    assert np.abs(np.asarray(logits) - tiny_jax.logits("qwen3")).mean() < 0.03


def test_unknown_family_and_layout_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match="model_type is 'rwkv'; allowed: llama, mistral"):
        registry.build({"model_type": "rwkv"}, tiny_jax.mesh(1), "tensor", jnp.float32)
    with pytest.raises(ConfigError, match="layout is 'fancy'; allowed: tensor, tensor-whole-vocab"):
        registry.build(tiny_models.CONFIGS["llama2"], tiny_jax.mesh(1), "fancy", jnp.float32)


def test_a_tied_model_ignores_a_stored_copy_of_its_head():
    assert r"lm_head\.weight" in tiny_jax.build("llama3")[0].ignored
    assert r"lm_head\.weight" not in tiny_jax.build("llama2")[0].ignored
