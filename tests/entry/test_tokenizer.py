"""Text to ids and back, from a Hugging Face folder and from what a GGUF file says."""

import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from checkpoints.catalogue import pulled_models
from jaxserve.constrained.vocabulary import Vocabulary
from jaxserve.entry import gguf_tokenizer, text_model, tokenizer
from jaxserve.types import CheckpointError, InvalidRequest

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "a\n\n\tb\r\nc",
    "I'm we'LL 12345 3.14",
    "你好，世界 привет 🤗👩‍👩‍👧",
    "naïve e\u0301 \u00a0 \u200b",
    "",
]


def byte_level_parts(pre: str | None, **fields) -> dict:
    """A GGUF vocabulary of all bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "Ġ Ġ", "Ġ 1", "h i", "hi hi", "3 4"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|end|>", "<|bos|>", "<tool>", *letters, *words, "hihihi"]
    types = [3, 3, 4, *[1] * (len(tokens) - 3)]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": 1, "eos_token_id": 0,
    } | fields  # fmt: skip


def pieces(tok, text, **options):
    return [tok.token_text(token) for token in tok.encode(text, **options)]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_back_what_was_encoded(request, name, text):
    tok = request.getfixturevalue(name)
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_decode_equals_the_library(request, name):
    tok = request.getfixturevalue(name)
    for text in TEXTS:
        ids = tok.encode(text)
        assert tok.decode(ids) == tok._backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["  ", "1", "2", "3", "4"]),  # digits go first, so both spaces stay together
        ("gpt-2", [" ", " ", "12", "34"]),
        (None, [" ", " ", "12", "34"]),
        ("qwen2", [" ", " ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<|bos|>", " ", " ", "12", "3", "4"]),  # three digits at most
    ],
)
def test_gguf_pre_tokenizer_cuts_as_named(pre, expected):
    tok = gguf_tokenizer.build(byte_level_parts(pre))
    assert pieces(tok, "  1234") == expected


def test_llama3_takes_whole_words_before_merges():
    tok = gguf_tokenizer.build(byte_level_parts("llama-bpe", add_bos_token=False))
    assert pieces(tok, "hihihi") == ["hihihi"]
    assert pieces(gguf_tokenizer.build(byte_level_parts("qwen2")), "hihihi") == ["hihi", "hi"]


def test_qwen_composes_characters():
    tok = gguf_tokenizer.build(byte_level_parts("qwen2"))
    assert tok.decode(tok.encode("e\u0301")) == "\u00e9"


def test_gguf_control_and_user_defined_tokens_stay_whole():
    tok = gguf_tokenizer.build(byte_level_parts("smollm"))
    assert tok.encode("hi<|end|><tool>") == [tok.token_id("hi"), 0, 2]
    assert tok.decode(tok.encode("hi<|end|><tool>")) == "hi<tool>"
    assert tok.decode([0, 2], skip_special_tokens=False) == "<|end|><tool>"


def test_gguf_end_of_text_ids_are_all_that_the_file_names():
    tok = gguf_tokenizer.build(byte_level_parts("smollm", eot_token_id=1))
    assert tok.eos_token_ids == {0, 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "nobody-knows"}, "nobody-knows"),
        ({"model": "bert"}, "bert"),
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
    ],
)
def test_gguf_that_is_not_known_is_refused_by_name(fields, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer.build(byte_level_parts("smollm") | fields)


def test_bos_is_added_once(sentencepiece):
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("<s>the").count(1) == 1
    assert 1 not in sentencepiece.encode("the", add_special_tokens=False)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(sentencepiece):
    assert pieces(sentencepiece, "the cat", add_special_tokens=False) == [" the", " cat"]
    assert len(sentencepiece.encode("é", add_special_tokens=False)) == 3  # the space and two bytes


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_saved_tokenizer_loads_as_it_was(request, name, tmp_path):
    tok = request.getfixturevalue(name)
    tok.save(tmp_path)
    loaded = tokenizer.load_folder(tmp_path)
    assert loaded is not None
    assert loaded.eos_token_ids == tok.eos_token_ids
    assert (loaded.bos_token_id, loaded.eos_token) == (tok.bos_token_id, tok.eos_token)
    assert loaded.special_token_ids == tok.special_token_ids
    for text in TEXTS:
        assert loaded.encode(text) == tok.encode(text)
    if tok.chat_template is not None:
        messages = [{"role": "user", "content": "hi"}]
        assert loaded.chat_template is not None
        assert loaded.chat_template.render(messages) == tok.chat_template.render(messages)


def test_folder_without_tokenizer_has_none(tmp_path):
    assert tokenizer.load_folder(tmp_path) is None


def test_folder_with_only_an_old_form_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model.*tokenizer\.json"):
        tokenizer.load_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_broken_files_are_named(tmp_path, byte_level, content):
    byte_level.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer.load_folder(tmp_path)
    byte_level.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content or "[")
    if content != '{"version": "1.0"}':
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            tokenizer.load_folder(tmp_path)


def test_tokens_that_only_the_config_names_are_added(tmp_path, byte_level):
    byte_level.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    index = byte_level.vocab_size
    settings["added_tokens_decoder"] = {str(index): {"content": "<new>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = tokenizer.load_folder(tmp_path)
    assert loaded is not None
    assert loaded.encode("a<new>")[-1] == index
    settings["added_tokens_decoder"] = {str(index + 5): {"content": "<new>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="<new>"):
        tokenizer.load_folder(tmp_path)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_config_says_whether_bos_is_added(request, tmp_path, name, adds):
    tok = request.getfixturevalue(name)
    tok.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["bos_token"] = settings["bos_token"] or "<|start|>"
    settings.pop("add_bos_token", None)
    settings.pop("add_eos_token", None)
    if adds is not None:
        settings["add_bos_token"] = adds
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = tokenizer.load_folder(tmp_path)
    assert loaded is not None
    expected = name == "sentencepiece" if adds is None else adds
    assert (loaded.encode("the")[0] == loaded.bos_token_id) == expected


def test_unknown_decoder_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        tokenizer.load_folder(tmp_path)


def test_padding_and_truncation_of_a_file_are_off(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel()
    backend.enable_truncation(1)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_folder(tmp_path)
    assert loaded is not None
    assert loaded.encode("aba") == [0, 1, 0]


def test_lone_surrogates_are_refused(byte_level):
    with pytest.raises(InvalidRequest, match="Unicode"):
        byte_level.encode("a\ud800b")


def test_hopelessly_long_text_is_refused_before_it_is_encoded(byte_level):
    with pytest.raises(InvalidRequest, match="characters"):
        byte_level.encode("a" * 100_000, max_tokens=16)


def test_long_text_gives_the_ids_of_its_parts(byte_level, sentencepiece):
    text = "The cat sat.\n" * 2000
    assert byte_level.encode(text) == byte_level.encode("The cat sat.\n") * 2000
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@pytest.mark.parametrize("token", [-1, 10**12])
def test_ids_that_are_no_tokens_have_no_text(byte_level, token):
    ids = byte_level.encode("dog", False)
    assert byte_level.decode([*ids, token]) == "dog"
    assert byte_level.token_text(token) == ""


def test_gap_below_an_added_token_is_counted(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<x>": 7}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<x>"])
    tok = tokenizer.Tokenizer(backend)
    assert tok.vocab_size == 8
    assert tok.decode([0, 3, 7]) == "a<x>"


def test_importing_the_text_side_takes_no_jax_torch_or_transformers():
    code = (
        "import sys, jaxserve, jaxserve.entry.client, jaxserve.entry.llm\n"
        "print(*{'jax', 'torch', 'transformers', 'flax'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.real_model
@pytest.mark.skipif(
    "smollm2-135m-instruct" not in pulled_models(), reason="smollm2-135m-instruct is not pulled"
)
def test_real_model_encodes_as_transformers_does():
    """Ids from transformers 5.24 on the same GGUF file, and the template's prompt."""
    tok = text_model.load_text_model("smollm2-135m-instruct").tokenizer
    assert tok is not None
    assert tok.chat_template is not None
    for text, ids in {
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "\t\ttabs\r\nwin": [197, 197, 100, 7366, 201, 198, 5544],
        "I'm you're they'll WE'VE": [57, 5248, 346, 2316, 502, 3060, 26587, 23, 18525],
        "price: $12.50!": [17517, 42, 1885, 33, 34, 30, 37, 32, 17],
        "你好，世界！": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 8083, 219],
        "العربية": [22208, 34966, 20602, 31462, 23339, 43463],
        "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    }.items():
        assert tok.encode(text) == ids
        assert tok.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    expected = [1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 34, 27, 34, 47, 2, 198, 1]
    assert tok.encode(tok.chat_template.render(messages), False) == [*expected, 520, 9531, 198]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_grammars_see_the_bytes_of_each_token(kind, request):
    tokenizer = request.getfixturevalue(kind)
    vocabulary = Vocabulary(tokenizer.to_json(), sorted(tokenizer.eos_token_ids), 512)
    assert vocabulary.eos_token_ids == tokenizer.eos_token_ids
    differ = [
        tokenizer.token_bytes(i)
        for i in range(tokenizer.vocab_size)
        if vocabulary.tokenizer.decode_bytes([i]) != tokenizer.token_bytes(i)
    ]
    assert differ == [b"\xff"]  # which no text of UTF-8 has
