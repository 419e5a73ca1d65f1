"""Each family on a small random config against what Hugging Face's model computed in float32."""

import pathlib

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
