"""The text side of a model: its name, tokenizer, defaults and ends of text. Imports no jax."""

import dataclasses
import logging

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
    """What generation_config.json states of DEFAULTS and of max_new_tokens (here max_tokens)."""
    eos_token_ids: frozenset[int]
    """End a text: those of the config, of generation_config.json and of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)


log = logging.getLogger(__name__)

DEFAULTS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
)
"""Keys of generation_config.json that take effect where a request says nothing."""
NOT_SUPPORTED = {
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
"""Keys of generation_config.json that would change what is sampled, with the values that don't."""


def load_text_model(model: str) -> TextModel:
    """Reads the text side of a model; no weights. Raises: CheckpointError, UnsupportedModel."""
    return text_model(resolve(model))


def text_model(files: ModelFiles) -> TextModel:
    tokenizer = load_tokenizer(files)
    stated = {
        name: value for name in DEFAULTS if (value := files.generation_config.get(name)) is not None
    }
    if (value := files.generation_config.get("max_new_tokens")) is not None:
        stated["max_tokens"] = value
    for name, neutral in NOT_SUPPORTED.items():
        if files.generation_config.get(name) not in (None, neutral):
            log.warning(
                "%s: generation_config.json asks for %s, which is not supported", files.name, name
            )
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
