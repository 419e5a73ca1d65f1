"""Each family on a small random config against what Hugging Face's model computed in float32."""

import pathlib

import jax
import numpy as np
import pytest
import tiny_jax
import tiny_models

# Both sums run in float32 in different orders; logits are of size 1 (seen: 5e-6).
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def hf_logits():
    with np.load(pathlib.Path(tiny_models.__file__).parent / "hf_logits.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_logits_equal_hugging_face(name, hf_logits):
    np.testing.assert_allclose(tiny_jax.logits(name), hf_logits[name], rtol=0, atol=TOLERANCE)


def test_cases_differ_in_what_they_are_for(hf_logits):
    """Without windows and scalings the fixtures' logits would be others."""
    assert np.abs(hf_logits["qwen2-window"] - hf_logits["qwen2"]).max() > 0.1
    for name, plain in (
        ("llama3", {"rope_scaling": None}),
        ("mistral", {"sliding_window": None}),
        ("qwen3-bias-window", {"layer_types": ["full_attention"] * 3}),
    ):
        config = {**tiny_models.CONFIGS[name], **plain}
        built = tiny_jax.registry.build(config, tiny_jax.mesh(1), "tensor", np.float32)
        leaves = tiny_jax.apply_rules(built, tiny_models.tensors(config))
        other = tiny_jax.whole(built)(leaves, tiny_models.token_ids(config))
        assert np.abs(np.asarray(other) - hf_logits[name]).max() > 0.1, name


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_states_are_those_that_hugging_faces_logits_came_from(name, hf_logits):
    """There are more logits than state is wide, so one state alone explains them."""
    built, leaves = tiny_jax.build(name)
    config = tiny_models.CONFIGS[name]

    def states(leaves, token_ids):
        model = built.merge(leaves)
        none = (np.zeros(()),) * built.config.num_layers
        positions = np.arange(len(token_ids))
        hidden, _ = model.forward(token_ids, positions, none, tiny_jax.dense_attend)
        return model.states(hidden)

    tensors = tiny_models.tensors(config)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    expected = np.linalg.lstsq(head.astype(np.float64), hf_logits[name].T, rcond=None)[0].T
    found = np.asarray(jax.jit(states)(leaves, tiny_models.token_ids(config)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
