"""Text to token ids and back, from a Hugging Face folder or a GGUF file's metadata. Imports no jax
and no torch.

Built on the `tokenizers` library alone: what `transformers` adds to it is seconds of import and
code chosen by the checkpoint. Two kinds of vocabulary are known, byte-level BPE and SentencePiece
with byte fallback; each token of either stands for a fixed run of bytes, which is what makes
incremental decoding exact (see `detokenizer`).
"""

import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.types import CheckpointError, InvalidRequest

LONG_TEXT = 8192
"""Texts of more characters take milliseconds to encode: `encode` lets other threads run then."""


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the rest for characters from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }


class Tokenizer:
    """One vocabulary with its special tokens and, where there is one, its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """`settings`: what `save` writes to tokenizer_config.json besides the tokens and the
        template.

        Raises: CheckpointError if the vocabulary's decoder is of no known kind.
        """
        self._backend = backend
        self._kind, self._strips_first_space = _decoder_kind(backend)
        self._settings = dict(settings or {})
        self._special: frozenset[int] = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._added = {
            index: token.content for index, token in backend.get_added_tokens_decoder().items()
        }
        # Added tokens may leave a gap above the vocabulary proper.
        self._vocab_size = max(backend.get_vocab_size(False), 1 + max(self._added, default=-1))
        self._bytes: dict[int, bytes] = {}
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = backend.token_to_id(bos_token) if bos_token else None
        named = backend.token_to_id(eos_token) if eos_token else None
        self.eos_token_ids: frozenset[int] = frozenset(
            [*([] if named is None else [named]), *eos_token_ids]
        )
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. A model's own vocabulary may be padded to more."""
        return self._vocab_size

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    @property
    def strips_first_space(self) -> bool:
        """SentencePiece: a text's first token carries a space that is not part of the text."""
        return self._strips_first_space

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / this many
        tokens.
        """
        return max(map(len, self._backend.get_vocab()), default=1)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        field: str = "prompt",
    ) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        `add_special_tokens` adds what the model expects around a text (mostly a BOS at its start),
        but no second BOS where the text begins with one. `max_tokens`: a text that must have more
        is refused before it is encoded. `field` names the text in errors.
        Raises: InvalidRequest if the text holds lone surrogates, or is too long for `max_tokens`
        whatever its tokens.
        """
        if (
            max_tokens is not None
            and len(text) > LONG_TEXT
            and len(text) > max_tokens * self.longest_token
        ):
            raise InvalidRequest(
                field, f"has {len(text)} characters, more than {max_tokens} tokens of any text hold"
            )
        if add_special_tokens and self.bos_token and text.startswith(self.bos_token):
            add_special_tokens = False
        try:
            if len(text) <= LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # The library keeps Python's global lock in `encode`, but not here.
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoded[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(field, f"is not valid Unicode text: {error}") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        shown = [i for i in token_ids if not skip_special_tokens or i not in self._special]
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", errors="replace")
        if self._strips_first_space and shown and shown[0] not in self._added:
            text = text.removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special ones as they are written; b"" for an id that
        is no token.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token on its own, for showing: bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _make_bytes(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if token is None:
            return b""
        if self._kind == "byte-level":
            table = _byte_of_character()
            try:
                return bytes([table[character] for character in token])
            except KeyError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode()

    def to_json(self) -> str:
        """The vocabulary and its rules, as a tokenizer.json has them."""
        return self._backend.to_str()

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat template, as Hugging Face lays
        them out.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = self._settings | {"bos_token": self.bos_token, "eos_token": self.eos_token}
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        settings.pop("chat_template", None)
        # More ids than the one named token end a text in some GGUF files; `load_folder` reads them
        # back.
        settings["eos_token_ids"] = sorted(self.eos_token_ids)
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template.source
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """("byte-level" or "sentencepiece", whether a text's first space is dropped)."""
    decoder: Any = backend.decoder
    state: Any = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return "byte-level", False
    if kinds == {"Metaspace"}:
        return "sentencepiece", steps[0].get("prepend_scheme", "always") != "never"
    replaces = any(s["type"] == "Replace" and s.get("pattern") == {"String": "▁"} for s in steps)
    if (
        replaces
        and "ByteFallback" in kinds
        and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    ):
        return "sentencepiece", "Strip" in kinds
    raise CheckpointError(
        f"tokenizer: its decoder is {' + '.join(s['type'] for s in steps)}; "
        "known are byte-level BPE and SentencePiece with byte fallback"
    )


def load_folder(folder: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None if it has none. Runs no code of the folder's.

    Raises: CheckpointError if its files can't be read, or are of a kind that isn't known.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        old = [
            name
            for name in ("tokenizer.model", "vocab.json", "spiece.model")
            if (folder / name).exists()
        ]
        if old:
            raise CheckpointError(
                f"{folder}: has {old[0]} but no tokenizer.json; make one with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every kind of bad file
        raise CheckpointError(f"{path}: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings = _read_json(folder / "tokenizer_config.json")
    for source in (settings, _read_json(folder / "special_tokens_map.json")):
        for name in ("bos_token", "eos_token"):
            settings.setdefault(name, source.get(name))
    _add_missing_tokens(backend, settings)
    _add_around(backend, settings)
    return Tokenizer(
        backend,
        bos_token=_token_content(settings.get("bos_token")),
        eos_token=_token_content(settings.get("eos_token")),
        eos_token_ids=settings.get("eos_token_ids") or (),
        chat_template=ChatTemplate.from_folder(folder, settings),
        settings=settings,
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds the tokens that only tokenizer_config.json names, at the ids that it gives them."""
    present = backend.get_added_tokens_decoder()
    for index, entry in sorted(
        (int(i), e) for i, e in (settings.get("added_tokens_decoder") or {}).items()
    ):
        if index in present or not isinstance(entry, dict):
            continue
        flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
        token = AddedToken(entry["content"], **{k: bool(entry[k]) for k in flags if k in entry})
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != index:
            raise CheckpointError(
                f"tokenizer_config.json: gives {token.content!r} the id {index}, "
                f"tokenizer.json {backend.token_to_id(token.content)}"
            )


def _add_around(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """What tokenizer_config.json says of BOS and EOS counts, whatever tokenizer.json has."""
    stated = [settings.get(f"add_{name}_token") for name in ("bos", "eos")]
    if stated == [None, None]:
        return
    names = [_token_content(settings.get(f"{name}_token")) for name in ("bos", "eos")]
    bos, eos = (n if adds and n else None for n, adds in zip(names, stated, strict=True))
    around = [token for token in (bos, "$A", eos) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in {bos, eos} - {None} if token]
    for token, index in ids:
        if index is None:
            raise CheckpointError(f"tokenizer_config.json: {token!r} is not in tokenizer.json")
    template = processors.TemplateProcessing(single=around, special_tokens=ids)
    backend.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]


def _token_content(token: Any) -> str | None:
    """A special token as tokenizer_config.json has it: a string, or an object with a content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is a {type(content).__name__}; allowed: a JSON object")
    return content
