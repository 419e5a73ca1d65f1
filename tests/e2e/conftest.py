"""A complete tiny model folder: weights, byte-level tokenizer, chat template."""

import json
import pathlib

import pytest
import tokenizers
from engines import write_model
from tokenizers import decoders, models, pre_tokenizers

SPECIAL = ["<|end|>", "<|start|>"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*SPECIAL, *alphabet])}
    write_model(folder, vocab_size=len(vocab), bos_token_id=None, eos_token_id=0)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
    )
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
