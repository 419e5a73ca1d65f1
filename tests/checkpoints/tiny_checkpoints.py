"""Tiny checkpoints in each format, written by the formats' own packages."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "c", "d"]

LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": len(TOKENS),
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Values of a Llama of `LLAMA`'s shape, under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), 64), "model.norm.weight": (64,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (64,),
            layer + "post_attention_layernorm.weight": (64,),
            layer + "self_attn.q_proj.weight": (64, 64),
            layer + "self_attn.k_proj.weight": (32, 64),
            layer + "self_attn.v_proj.weight": (32, 64),
            layer + "self_attn.o_proj.weight": (64, 64),
            layer + "mlp.gate_proj.weight": (96, 64),
            layer + "mlp.up_proj.weight": (96, 64),
            layer + "mlp.down_proj.weight": (64, 96),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def converter_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows (`LlamaModel.permute`)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under GGUF's names, in the order of rows that the converter makes for a Llama."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    converted = {}
    for name, value in tensors.items():
        if "q_proj" in name:
            value = converter_order(value, 4)
        if "k_proj" in name:
            value = converter_order(value, 2)
        converted[names.get_name(name, (".weight", ".bias"))] = value
    return converted


Quantised = tuple[np.ndarray, gguf.GGMLQuantizationType]


def write_gguf(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray | Quantised],
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> pathlib.Path:
    """Writes a file with the gguf package. A tensor is an array, or (block bytes, their type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (LLAMA | TOKENIZER if metadata is None else metadata).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], num_shards: int = 1
) -> pathlib.Path:
    """Writes a Hugging Face folder of a tiny Llama, sharded by an index if asked."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    if num_shards == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
