import math
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    LLAMA,
    TOKENIZER,
    TOKENS,
    converter_order,
    gguf_tensors,
    llama_tensors,
    write_gguf,
)

from checkpoints import gguf_file
from checkpoints.gguf import GgufSource, hf_config, llama3_scaling, tokenizer_parts
from checkpoints.gguf_file import PLAIN_DTYPES, read_gguf
from checkpoints.resolve import open_source, resolve
from jaxserve.types import CheckpointError, UnsupportedModel

Kind = gguf.GGMLQuantizationType
DECODABLE = [kind for kind in Kind if kind in gguf.quants._type_traits and kind not in PLAIN_DTYPES]
UNDECODABLE = [
    kind
    for kind in GGML_QUANT_SIZES
    if kind not in gguf.quants._type_traits and kind not in PLAIN_DTYPES
]


def read_one(path, name):
    source = GgufSource(path)
    try:
        return source.read(name)
    finally:
        source.close()


def random_blocks(kind, num_rows, width, seed=0):
    """Rows of blocks whose bits are random, but whose scales are finite."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_rows * width // block, block_bytes), np.uint8)
    while True:
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)
        if not bad.any():
            return blocks.reshape(num_rows, -1)
        blocks[bad] = rng.integers(0, 256, (bad.sum(), block_bytes), np.uint8)


def test_there_are_types_of_each_sort():
    assert len(DECODABLE) >= 20
    assert Kind.Q8_K in UNDECODABLE


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_block_type_is_dequantised_by_the_package(tmp_path, kind):
    blocks = random_blocks(kind, 5, 512)
    expected = gguf.quants.dequantize(blocks, kind)
    tensors = gguf_tensors(llama_tensors()) | {"blk.0.ffn_up.weight": (blocks, kind)}
    read = read_one(write_gguf(tmp_path / "a.gguf", tensors), "model.layers.0.mlp.up_proj.weight")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_chunks_of_any_size_give_the_same(tmp_path, kind, monkeypatch):
    blocks = random_blocks(kind, 7, 256)
    tensors = gguf_tensors(llama_tensors()) | {"blk.0.ffn_up.weight": (blocks, kind)}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    monkeypatch.setattr(gguf_file, "CHUNK_ELEMENTS", 512)
    read = read_one(path, "model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(read, gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name
)
def test_quantised_query_rows_come_back_in_hugging_faces_order(tmp_path, kind):
    weight = llama_tensors()["model.layers.1.self_attn.q_proj.weight"]
    stored = gguf.quants.quantize(converter_order(weight, 4), kind)
    tensors = gguf_tensors(llama_tensors()) | {"blk.1.attn_q.weight": (stored, kind)}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    read = read_one(path, "model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("kind", UNDECODABLE, ids=lambda kind: kind.name)
def test_a_type_that_the_package_cannot_decode_is_named(tmp_path, kind):
    stored = np.zeros((2, GGML_QUANT_SIZES[kind][1]), np.uint8)
    tensors = gguf_tensors(llama_tensors()) | {"blk.0.ffn_up.weight": (stored, kind)}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    with pytest.raises(CheckpointError, match=f"blk.0.ffn_up.weight' is {kind.name}"):
        read_one(path, "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int32, np.int8])
def test_plain_types_stay_as_they_are(tmp_path, dtype):
    value = np.arange(12).reshape(3, 4).astype(dtype)
    tensors = gguf_tensors(llama_tensors()) | {"blk.0.ffn_up.weight": value}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    read = read_one(path, "model.layers.0.mlp.up_proj.weight")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, value)


def test_bfloat16_stays_as_it_is(tmp_path):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    stored = gguf.quants.quantize(value, Kind.BF16)
    tensors = gguf_tensors(llama_tensors()) | {"blk.0.ffn_up.weight": (stored, Kind.BF16)}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    read = read_one(path, "model.layers.0.mlp.up_proj.weight")
    assert read.dtype.name == "bfloat16"
    np.testing.assert_array_equal(read.astype(np.float32), value)


def test_a_llama_comes_back_under_hugging_faces_names(gguf_path):
    source = open_source(resolve(str(gguf_path)))
    expected = llama_tensors()
    assert source.names().keys() == expected.keys()
    for name, value in expected.items():
        assert source.names()[name] == (value.shape, value.dtype)
        np.testing.assert_array_equal(source.read(name), value, err_msg=name)
    source.close()


def test_query_and_key_biases_of_a_llama_come_back_too(tmp_path):
    bias = np.arange(64, dtype=np.float32)
    tensors = gguf_tensors(llama_tensors()) | {
        "blk.0.attn_q.bias": converter_order(bias, 4),
        "blk.0.attn_k.bias": converter_order(bias[:32], 2),
        "blk.0.attn_v.bias": bias[:32],
    }
    path = write_gguf(tmp_path / "a.gguf", tensors)
    np.testing.assert_array_equal(read_one(path, "model.layers.0.self_attn.q_proj.bias"), bias)
    np.testing.assert_array_equal(read_one(path, "model.layers.0.self_attn.k_proj.bias"), bias[:32])
    np.testing.assert_array_equal(read_one(path, "model.layers.0.self_attn.v_proj.bias"), bias[:32])
    assert resolve(str(path)).config["attention_bias"] is True


def test_header_is_what_the_packages_own_reader_reads(gguf_path):
    file, reader = read_gguf(gguf_path), gguf.GGUFReader(gguf_path)
    theirs = {key: field.contents() for key, field in reader.fields.items()}
    assert file.metadata == {k: v for k, v in theirs.items() if not k.startswith("GGUF.")}
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.kind == tensor.tensor_type


def renamed(architecture):
    return {k.replace("llama.", architecture + "."): v for k, v in LLAMA.items()} | TOKENIZER


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_query_rows_of_a_qwen_keep_their_order(tmp_path, architecture):
    weight = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    norm = np.arange(16, dtype=np.float32)
    tensors = gguf_tensors(llama_tensors()) | {
        "blk.0.attn_q.weight": weight,
        "blk.0.attn_q_norm.weight": norm,
    }
    path = write_gguf(tmp_path / "a.gguf", tensors, renamed(architecture), architecture)
    np.testing.assert_array_equal(read_one(path, "model.layers.0.self_attn.q_proj.weight"), weight)
    np.testing.assert_array_equal(read_one(path, "model.layers.0.self_attn.q_norm.weight"), norm)
    assert resolve(str(path)).config["model_type"] == architecture


def test_an_unknown_tensor_keeps_its_name(tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", gguf_tensors(llama_tensors()) | extra)
    assert "blk.0.ffn_gate_inp.weight" in GgufSource(path).names()


# ---- config


def config_of(tmp_path, metadata=None, extra=None, architecture="llama"):
    tensors = gguf_tensors(llama_tensors()) | (extra or {})
    metadata = LLAMA | TOKENIZER | (metadata or {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "config.gguf", tensors, metadata, architecture)
    return hf_config(path, read_gguf(path))


def test_config_says_what_the_metadata_says(tmp_path):
    config = config_of(tmp_path)
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_output_weight_means_untied(tmp_path):
    extra = {"output.weight": np.zeros((8, 64), np.float32)}
    assert config_of(tmp_path, extra=extra)["tie_word_embeddings"] is False


def test_defaults_of_the_format(tmp_path):
    metadata = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None}
    config = config_of(tmp_path, metadata | {"llama.rope.dimension_count": None})
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10000.0


def test_heads_wider_than_the_model(tmp_path):
    wide = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    assert config_of(tmp_path, wide | {"llama.rope.dimension_count": 32})["head_dim"] == 32


def test_sliding_window_makes_it_a_mistral(tmp_path):
    config = config_of(tmp_path, {"llama.attention.sliding_window": 4096})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4096)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
                "rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, scaling):
    metadata = {f"llama.{key}": value for key, value in metadata.items()}
    assert config_of(tmp_path, metadata)["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.causal": False}, "attention.causal = False"),
        ({"llama.attention.head_count": [4, 8]}, r"head_count is \[4, 8\]"),
        ({"llama.block_count": 2.0}, "block_count is 2.0"),
        ({"llama.feed_forward_length": 0}, "feed_forward_length is 0"),
        ({"llama.rope.freq_base": -1.0}, "freq_base is -1.0"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, the heads are 16 wide"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
    ],
)
def test_what_nothing_handles_is_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(UnsupportedModel, match=message):
        config_of(tmp_path, metadata)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "context_length"])
def test_a_missing_value_is_named(tmp_path, key):
    with pytest.raises(CheckpointError, match=rf"llama\.{key} is missing"):
        config_of(tmp_path, {f"llama.{key}": None})


def test_scaling_without_its_factor(tmp_path):
    with pytest.raises(CheckpointError, match="states no factor"):
        config_of(tmp_path, {"llama.rope.scaling.type": "linear"})


def test_architecture_that_nothing_handles(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, {}, "mamba")
    with pytest.raises(UnsupportedModel, match="'mamba' is not handled; handled: llama, qwen2"):
        resolve(str(path))


def test_file_without_an_embedding(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"x": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="token_embd"):
        resolve(str(path))


def test_query_rows_that_the_heads_do_not_divide(tmp_path):
    extra = {"blk.0.attn_q.weight": np.ones((60, 64), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", gguf_tensors(llama_tensors()) | extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight.* has 60 rows"):
        read_one(path, "model.layers.0.self_attn.q_proj.weight")


def llama3_divisors(head_dim, theta, factor, low, high, context):
    """As the converter computes `rope_freqs.weight` (`LlamaModel.generate_extra_tensors`)."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_factors_become_llama3_scaling(tmp_path, head_dim, factor):
    metadata = {
        "llama.rope.freq_base": 500000.0,
        "llama.attention.key_length": head_dim,
        "llama.rope.dimension_count": head_dim,
    }
    factors = llama3_divisors(head_dim, 500000.0, factor, 1.0, 4.0, 8192)
    config = config_of(tmp_path, metadata, {"rope_freqs.weight": factors})
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in GgufSource(tmp_path / "config.gguf").names()


@settings(deadline=None)
@given(
    factor=st.sampled_from([2.0, 4.0, 8.0, 16.0, 32.0]),
    low=st.sampled_from([1.0, 2.0]),
    ratio=st.sampled_from([2.0, 4.0, 8.0]),
    context=st.sampled_from([2048, 4096, 8192, 16384]),
    theta=st.sampled_from([10000.0, 500000.0, 1000000.0]),
)
def test_any_llama3_scaling_is_recovered(tmp_path_factory, factor, low, ratio, context, theta):
    stored = llama3_divisors(128, theta, factor, low, low * ratio, context)
    found = llama3_scaling(stored.tolist(), 128, theta, "file")
    if found is None:
        assert (stored == 1).all()
        return
    again = llama3_divisors(
        128,
        theta,
        found["factor"],
        found["low_freq_factor"],
        found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(again, stored, rtol=2e-4)


@pytest.mark.parametrize("factors", [[1.0, 3.0, 2.0] + [1.0] * 5, [1.0] * 7, [0.0] * 8])
def test_rope_factors_that_no_scaling_gives(tmp_path, factors):
    with pytest.raises(CheckpointError, match="rope_freqs"):
        config_of(tmp_path, extra={"rope_freqs.weight": np.asarray(factors, np.float32)})


def test_rope_factors_of_one_change_nothing(tmp_path):
    config = config_of(tmp_path, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert config["rope_scaling"] is None


def test_generation_config_has_every_end_of_text_and_the_sampling_defaults(tmp_path):
    metadata = {
        "tokenizer.ggml.eot_token_id": 0,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    path = write_gguf(
        tmp_path / "a.gguf", gguf_tensors(llama_tensors()), LLAMA | TOKENIZER | metadata
    )
    assert resolve(str(path)).generation_config == {
        "eos_token_id": [2, 0],
        "bos_token_id": 1,
        "temperature": 0.5,
        "top_k": 20,
    }


# ---- tokenizer


def test_tokenizer_parts_are_the_metadata(gguf_path):
    parts = tokenizer_parts(gguf_path)
    assert parts["tokens"] == TOKENS
    assert parts["merges"] == ["a b"]
    assert (parts["model"], parts["pre"]) == ("gpt2", "smollm")
    assert parts["chat_template"] == "{{ messages }}"
    assert (parts["bos_token_id"], parts["eos_token_id"], parts["eot_token_id"]) == (1, 2, None)
    assert (parts["add_bos_token"], parts["add_eos_token"]) == (False, None)
    assert parts["scores"] is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": None}, "carries no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "carries no tokenizer"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens has the wrong type"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 8 tokens"),
        ({"tokenizer.ggml.scores": [0.5]}, "scores has 1 entries for 8 tokens"),
        ({"tokenizer.ggml.bos_token_id": 8}, "bos_token_id is 8; there are 8 tokens"),
        ({"tokenizer.chat_template": 3}, "chat_template has the wrong type"),
    ],
)
def test_tokenizers_that_do_not_hold_together(tmp_path, metadata, message):
    metadata = {k: v for k, v in (LLAMA | TOKENIZER | metadata).items() if v is not None}
    path = write_gguf(tmp_path / "a.gguf", {}, metadata)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_parts(path)


def test_all_ones_means_no_such_token(tmp_path):
    metadata = LLAMA | TOKENIZER | {"tokenizer.ggml.bos_token_id": 2**32 - 1}
    path = write_gguf(tmp_path / "a.gguf", gguf_tensors(llama_tensors()), metadata)
    assert tokenizer_parts(path)["bos_token_id"] is None
    assert "bos_token_id" not in resolve(str(path)).config


# ---- damaged files


def test_every_kind_of_value_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "ünï")
    writer.add_array("flags", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "a.gguf").metadata
    assert metadata == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "i32": -3,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "yes": True,
        "text": "ünï",
        "flags": [True, False],
        "nested": [[1, 2], [3]],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return write_gguf(path, gguf_tensors(llama_tensors())).read_bytes()


@settings(deadline=None)
@given(data=st.data())
def test_truncated_anywhere(tmp_path_factory, whole, data):
    path = tmp_path_factory.mktemp("truncated") / "a.gguf"
    # the last tensor may be followed by padding, which nobody misses
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 64))])
    with pytest.raises(CheckpointError):
        resolve(str(path))


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_header_reads_or_is_refused(tmp_path_factory, whole, data):
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        read_gguf(path)
        resolve(str(path))
        tokenizer_parts(path)
    except (CheckpointError, UnsupportedModel):
        pass


def header(num_tensors=0, num_values=0, version=3, magic=b"GGUF", rest=b""):
    return magic + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGUF", "is not a GGUF file"),
        (header(magic=b"GGML"), "is not a GGUF file"),
        (header(version=1), "is GGUF version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(num_values=1), "truncated or damaged"),
        (header(num_values=2**60), "truncated or damaged"),
        (header(num_values=1, rest=text(b"k") + struct.pack("<I", 77)), "a value of kind 77"),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**60)),
            "states a list of",
        ),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**60)),
            "truncated or damaged",
        ),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**40)),
            "ends inside a list of strings",
        ),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<I", 9) * 8 + bytes(200)),
            "truncated or damaged",
        ),
        (
            header(
                num_values=1, rest=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9
            ),
            "nested",
        ),
        (header(num_values=1, rest=text(b"\xff") + bytes(8)), "not UTF-8"),
        (header(num_values=2, rest=(text(b"k") + struct.pack("<II", 4, 1)) * 2), "'k' twice"),
        (
            header(num_values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3)),
            "allowed: a power of two",
        ),
        (header(num_tensors=1, rest=text(b"t") + struct.pack("<I", 99)), "99 dimensions"),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0)),
            "type 999",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 2, 0)),
            "rows of 4, not a multiple of Q4_0's block of 32",
        ),
        (header(num_tensors=1, rest=text(b"t") + struct.pack("<IIQ", 0, 2, 0)), "no dimensions"),
        (
            header(
                num_tensors=2, rest=(text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)) * 2 + bytes(64)
            ),
            "holds tensor 't' twice",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 2**60, 0, 0)),
            "the file is truncated",
        ),
        (
            header(
                num_values=1,
                rest=text(b"general.architecture") + struct.pack("<IIQI", 9, 4, 1, 7),
            ),
            r"architecture \[7\]",
        ),
    ],
)
def test_headers_that_say_nonsense(tmp_path, content, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        resolve(str(path))


def test_a_header_that_states_too_much_takes_no_memory(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(header(num_values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, 2**40)))
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# ---- split files


def write_split(folder, num_parts=2):
    tensors = gguf_tensors(llama_tensors())
    for part in range(num_parts):
        names = list(tensors)[part::num_parts]
        split = {"split.no": part, "split.count": num_parts, "split.tensors.count": len(tensors)}
        metadata = (LLAMA | TOKENIZER if part == 0 else {}) | split
        path = folder / f"tiny-{part + 1:05d}-of-{num_parts:05d}.gguf"
        write_gguf(path, {name: tensors[name] for name in names}, metadata)
    return folder / f"tiny-00001-of-{num_parts:05d}.gguf"


def test_parts_of_a_split_file_are_one_model(tmp_path):
    path = write_split(tmp_path)
    for model in (path, tmp_path):
        source = open_source(resolve(str(model)))
        for name, value in llama_tensors().items():
            np.testing.assert_array_equal(source.read(name), value)
        source.close()


def test_missing_part(tmp_path):
    path = write_split(tmp_path)
    (tmp_path / "tiny-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"missing: tiny-00002-of-00002\.gguf"):
        resolve(str(path))


def test_part_under_another_name(tmp_path):
    path = write_split(tmp_path)
    with pytest.raises(CheckpointError, match="one of 2 parts, but not named"):
        resolve(str(path.rename(tmp_path / "renamed.gguf")))


def test_parts_that_hold_too_few_tensors(tmp_path):
    path = write_split(tmp_path)
    split = {"split.no": 1, "split.count": 2}
    write_gguf(tmp_path / "tiny-00002-of-00002.gguf", {"x": np.ones(1, np.float32)}, split)
    with pytest.raises(CheckpointError, match="are announced"):
        resolve(str(path))


def test_parts_that_repeat_a_tensor(tmp_path):
    path = write_split(tmp_path)
    again = {"token_embd.weight": np.ones((8, 64), np.float32)}
    write_gguf(tmp_path / "tiny-00002-of-00002.gguf", again, {"split.no": 1, "split.count": 2})
    with pytest.raises(CheckpointError, match="repeats tensors of an earlier part: token_embd"):
        resolve(str(path))
