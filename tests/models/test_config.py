"""Reading config.json: what is understood, and that the rest is refused by name."""

import json
import subprocess
import sys

import pytest
import tiny_models

from jaxserve.models import ModelConfig, shard_heads
from jaxserve.models.config import RopeScaling
from jaxserve.types import ConfigError, UnsupportedModel

LLAMA_31_8B = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
  "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
  "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
  "vocab_size": 128256}""")

SMOLLM2_135M = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
  "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
  "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
  "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
  "use_cache": true, "vocab_size": 49152}""")

QWEN2_7B = json.loads("""{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
  "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
  "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
  "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 152064}""")

# What transformers 5 writes for any model, with its own names for rope and dtype.
WRITTEN_BY_TRANSFORMERS_5 = {
    "_name_or_path": "",
    "architectures": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "output_attentions": False,
    "output_hidden_states": False,
    "pad_token_id": None,
    "problem_type": None,
    "return_dict": True,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(base, **changes):
    return ModelConfig.from_hf({**base, **changes})


def without(base, key):
    return {name: value for name, value in base.items() if name != key}


def test_llama_31():
    config = read(LLAMA_31_8B)
    assert config.head_dim == 128
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4


def test_smollm2():
    config = read(SMOLLM2_135M)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_qwen2_has_biases_and_no_window_unless_asked():
    config = read(QWEN2_7B)
    assert (config.qkv_bias, config.o_bias) == (True, False)
    assert config.sliding_window is None
    windowed = read(QWEN2_7B, use_sliding_window=True, max_window_layers=20)
    assert windowed.sliding_window == 131072
    assert [windowed.window(i) for i in (0, 19, 20, 27)] == [None, None, 131072, 131072]


def test_transformers_5_keys():
    config = read(WRITTEN_BY_TRANSFORMERS_5)
    assert (config.head_dim, config.qk_norm, config.rope_theta) == (128, True, 1000000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_rope_keys_of_both_versions_mean_the_same():
    for kind, numbers in (("linear", {"factor": 2.0}), ("default", {})):
        old = read(LLAMA_31_8B, rope_theta=1e6, rope_scaling={"type": kind, **numbers})
        parameters = {"rope_type": kind, "rope_theta": 1e6, **numbers}
        new = read(
            without(without(LLAMA_31_8B, "rope_theta"), "rope_scaling"), rope_parameters=parameters
        )
        assert old == new


def test_mistral_slides_everywhere_unless_null():
    mistral = tiny_models.CONFIGS["mistral"]
    assert read(mistral).sliding_layers == (True,) * 3
    assert read(mistral, sliding_window=None).sliding_window is None
    assert read(without(mistral, "sliding_window")).sliding_window == 4096  # transformers' default


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mystery_scale", 2.0),
        ("sliding_window", 4096),  # not a key of Llama's
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("auto_map", {"AutoModelForCausalLM": "modeling_mine.MyModel"}),
        ("partial_rotary_factor", 0.5),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("model_type", "mamba"),
        ("model_type", None),
        ("num_key_value_heads", 5),
        ("num_attention_heads", 0),
        ("num_hidden_layers", "32"),
        ("hidden_size", None),
        ("hidden_size", 4095),
        ("vocab_size", True),
        ("head_dim", 33),
        ("attention_bias", "no"),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("eos_token_id", "</s>"),
        ("rope_scaling", "llama3"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}),
        ("rope_scaling", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
        ("rope_scaling", {**LLAMA_31_8B["rope_scaling"], "high_freq_factor": 1.0}),
    ],
)
def test_what_is_not_handled_is_refused_by_name(key, value):
    name = {"rope_scaling": "rope_scaling|beta_fast"}.get(key, key)
    with pytest.raises(UnsupportedModel, match=name):
        read(LLAMA_31_8B, **{key: value})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 28}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers"),
        ({"attention_bias": True}, "attention_bias"),  # its biases are fixed
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "rope_scaling"),
        ({"use_mrope": True}, "use_mrope"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    ],
)
def test_windows_that_are_not_handled_are_refused(changes, name):
    with pytest.raises(UnsupportedModel, match=name):
        read(QWEN2_7B, **changes)


def test_a_switch_that_is_off_is_fine_in_any_family():
    assert read(QWEN2_7B, attention_bias=False, mlp_bias=False) == read(QWEN2_7B)


def test_a_null_key_is_an_absent_one():
    assert read(LLAMA_31_8B, mystery_scale=None) == read(LLAMA_31_8B)


def test_token_ids_outside_the_vocabulary_are_dropped():
    config = read(LLAMA_31_8B, eos_token_id=[2, 128256], bos_token_id=-1)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), None)


def test_sizes_that_divide():
    llama, smollm2, qwen2 = read(LLAMA_31_8B), read(SMOLLM2_135M), read(QWEN2_7B)
    assert [shard_heads(llama, t) for t in (1, 2, 4, 8, 16, 32)] == [8, 8, 8, 8, 16, 32]
    assert [shard_heads(smollm2, t) for t in (1, 3)] == [3, 3]
    assert [shard_heads(qwen2, t) for t in (1, 2, 4)] == [4, 4, 4]
    for config, tensor, works in (
        (smollm2, 9, "1, 3 "),
        (qwen2, 8, "1, 2, 4 "),
        (llama, 0, "1, 2, 4, "),
    ):
        with pytest.raises(
            ConfigError, match=f"tensor is {tensor}; allowed for this model: {works}"
        ):
            shard_heads(config, tensor)


def test_reading_a_config_needs_no_jax():
    code = "import sys; import jaxserve.models.config; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
