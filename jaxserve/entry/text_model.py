"""The text side of a model: its name, tokenizer, defaults and ends of text. Imports no jax."""

import dataclasses

from checkpoints.gguf import tokenizer_parts
from checkpoints.resolve import ModelFiles, resolve
from jaxserve.entry import gguf_tokenizer
from jaxserve.entry import tokenizer as tokenizers
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.types import CheckpointError, InvalidRequest, SamplingParams


@dataclasses.dataclass(frozen=True)
class TextModel:
    """What the entry needs to know of a model."""

    name: str
    tokenizer: Tokenizer | None
    """None: the folder has none; only token ids go in and out."""
    defaults: SamplingParams
    """What generation_config.json states of temperature, top_k, top_p and min_p; None elsewhere."""
    eos_token_ids: frozenset[int]
    """End a text: those of the config, of generation_config.json and of the tokenizer."""


def load_text_model(model: str) -> TextModel:
    """Reads the text side of a model; no weights. Raises: CheckpointError, UnsupportedModel."""
    return text_model(resolve(model))


def text_model(files: ModelFiles) -> TextModel:
    tokenizer = load_tokenizer(files)
    stated = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := files.generation_config.get(name)) is not None
    }
    try:
        defaults = SamplingParams(**stated)
    except InvalidRequest as error:
        raise CheckpointError(f"{files.path}: generation_config.json: {error}") from error
    eos: set[int] = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    for source in (files.config, files.generation_config):
        ids = source.get("eos_token_id")
        eos.update([ids] if isinstance(ids, int) else ids or ())
    return TextModel(files.name, tokenizer, defaults, frozenset(eos))


def load_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """A model's tokenizer, wherever it keeps it; None if it has none. Raises: CheckpointError."""
    if files.kind == "gguf":
        return gguf_tokenizer.build(tokenizer_parts(files.path))
    return tokenizers.load_folder(files.path)
