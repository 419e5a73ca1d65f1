"""A tokenizer from what a GGUF file says of its vocabulary. Imports no jax and no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.entry.tokenizer import Tokenizer
from jaxserve.types import CheckpointError

# How text is cut before merging, by the name that GGUF files use. These are the patterns of the
# models' own tokenizer.json files; `None` is GPT-2's, which the library has built in.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTION"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTION"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("CONTRACTION", "").replace("DIGITS", r"\p{N}")
_GPT4O = _CASED.replace("CONTRACTION", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(
    "DIGITS", r"\p{N}{1,3}"
)
_DIGITS = "digits"
_PRE_TOKENIZERS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("gpt-2", "default", "", "phi-2", "olmo", "mpt"), None),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
# Vocabularies whose whole words win over the merges that would build something else.
_IGNORE_MERGES = frozenset({_LLAMA3, _TEKKEN})
_ADDS_BOS_UNLESS_TOLD = frozenset({_LLAMA3, _TEKKEN})
# Qwen's tokenizers compose characters first.
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


def build(parts: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    `parts`: as `checkpoints.gguf.tokenizer_parts` returns them.
    Raises: CheckpointError for a model or pre-tokenizer that isn't known, or a part that is
    missing.
    """
    tokens: list[str] | None = parts.get("tokens")
    if not tokens:
        raise CheckpointError("GGUF: has no tokenizer.ggml.tokens")
    kind = parts.get("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_backend(tokens, parts)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_backend(tokens, parts), True
    else:
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.model is {kind!r}; known are 'gpt2' and 'llama'"
        )

    types: Sequence[int] = parts.get("token_type") or [1] * len(tokens)
    backend.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    backend.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _USER_DEFINED
        ]
    )
    if backend.get_vocab_size(with_added_tokens=True) > len(tokens):
        raise CheckpointError("GGUF: a control token is spelled like no token of the vocabulary")

    def named(key: str) -> str | None:
        index = parts.get(key)
        return tokens[index] if index is not None and 0 <= index < len(tokens) else None

    def flag(key: str, default: bool) -> bool:
        value = parts.get(key)
        return default if value is None else bool(value)

    bos, eos = named("bos_token_id"), named("eos_token_id")
    adds_bos, adds_eos = flag("add_bos_token", adds_bos), flag("add_eos_token", False)
    around = [*([bos] if adds_bos and bos else []), "$A", *([eos] if adds_eos and eos else [])]
    if len(around) > 1:
        ids = [(token, tokens.index(token)) for token in dict.fromkeys(around) if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    template = parts.get("chat_template")
    return Tokenizer(
        backend,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=[
            i for k in ("eos", "eot", "eom") if (i := parts.get(f"{k}_token_id")) is not None
        ],
        chat_template=ChatTemplate(template, bos_token=bos, eos_token=eos) if template else None,
        settings={
            "add_bos_token": adds_bos,
            "add_eos_token": adds_eos,
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_level_backend(
    tokens: list[str], parts: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, bool]:
    """(the tokenizer without its added tokens, whether it adds a BOS unless told otherwise)."""
    pre = parts.get("pre") or ""
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(name for name in _PRE_TOKENIZERS if name))
        raise CheckpointError(f"GGUF: tokenizer.ggml.pre is {pre!r}; known are {known}")
    if parts.get("merges") is None:
        raise CheckpointError("GGUF: has no tokenizer.ggml.merges")
    pattern = _PRE_TOKENIZERS[pre]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_split_merge(merge) for merge in parts["merges"]],
            ignore_merges=pattern in _IGNORE_MERGES,
        )
    )
    prefix = bool(parts.get("add_space_prefix") or False)
    if pattern is None or pattern == _DIGITS:
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)]
        if pattern == _DIGITS:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        steps = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend, pattern in _ADDS_BOS_UNLESS_TOLD


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_backend(tokens: list[str], parts: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: its merges are every way to cut a token into two, tried in the order of
    the token's score.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    scores: Sequence[float] | None = parts.get("scores")
    if parts.get("merges") is not None:
        merges = [_split_merge(merge) for merge in parts["merges"]]
    elif scores is not None:
        ranked = []
        for token, score in zip(tokens, scores, strict=True):
            cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
            cuts = [(left, right) for left, right in cuts if left in vocab and right in vocab]
            cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
            ranked += [(score, cut) for cut in cuts]
        ranked.sort(
            key=lambda item: -item[0]
        )  # stable: equal scores stay in the vocabulary's order
        merges = [cut for _, cut in ranked]
    else:
        raise CheckpointError("GGUF: has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
    unknown = parts.get("unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = parts.get("add_space_prefix") is not False
    replace = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), replace] if prefix else [replace]
    backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)  # pyright: ignore[reportAttributeAccessIssue]
    return backend
