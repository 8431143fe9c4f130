"""A tokenizer from a GGUF file's metadata.

Two kinds exist among language models: ``gpt2`` (byte-level BPE with a merge list) and ``llama`` (SentencePiece BPE with
scores and byte fallback). Both become a `tokenizers` BPE model whose encodings equal those of the tokenizer that the
file was converted from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from toque.errors import FormatError, UnsupportedModelError
from toque.text.byte_alphabet import BYTE_OF, SPACE, ByteCoding
from toque.text.end_tokens import turn_end_ids
from toque.text.pre_tokenizers import Splitting, splitting_of
from toque.text.spm_merges import merges_by_score
from toque.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, one number a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer, or raise FormatError naming the key that is damaged.

    ``add_eos_token`` is not followed: an end-of-text token closing every prompt is of use in training only.
    """
    kind = metadata.get(_KEY + "model")
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, len(tokens))
    named = {
        name: _token_id(metadata, key, len(tokens))
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    turn_ends = [_token_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id")]
    if kind == "gpt2":
        splitting, degraded = splitting_of(metadata.get(_KEY + "pre"))
        if degraded:
            log.warning("%s", degraded)
        backend = _byte_level(tokens, types, _strings(metadata, "merges"), splitting)
        coding, strip, add_bos = ByteCoding.BYTE_LEVEL, False, splitting.add_bos
        complete = set(BYTE_OF) <= set(tokens)
    elif kind == "llama":
        degraded = None
        prefix = _flag(metadata, "add_space_prefix", True)
        backend = _sentencepiece(tokens, types, _scores(metadata, len(tokens)), named["unk_token"], prefix)
        coding, strip, add_bos = ByteCoding.BYTE_FALLBACK, prefix, True
        complete = sum(kind == TokenType.BYTE for kind in types) == 256
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model {str(kind)[:40]!r} is not supported; supported are gpt2 and llama",
            param=_KEY + "model",
        )
    special = {index for index, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special.update(token for token in (*named.values(), *turn_ends) if token is not None)
    _add_tokens(backend, tokens, types, special, coding)

    template = metadata.get("tokenizer.chat_template")
    ends = {token for token in (named["eos_token"], *turn_ends) if token is not None}
    marked = {tokens[i]: i for i in special} | {
        t: i for i, t in enumerate(tokens) if types[i] == TokenType.USER_DEFINED
    }
    ends |= turn_end_ids(marked, template if isinstance(template, str) else "")
    bos = named["bos_token"]
    add_bos = bos is not None and _flag(metadata, "add_bos_token", add_bos)
    return Tokenizer(
        backend,
        coding=coding,
        vocab_size=_known(types),
        special_ids=frozenset(special),
        eos_ids=frozenset(ends),
        bos_id=bos,
        prefix=(bos,) if add_bos and bos is not None else (),
        strip_first_space=strip,
        special_texts={name: tokens[token] for name, token in named.items() if token is not None},
        longest_token=max(map(len, tokens)) if complete else 0,
        degraded=degraded,
    )


def _byte_level(
    tokens: Sequence[str], types: Sequence[int], merge_lines: Sequence[str], splitting: Splitting
) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = _vocabulary(tokens, types)
    merges = [tuple(line.split(" ")) for line in merge_lines]
    backend = Tokenizer(_bpe(models.BPE, vocab, merges, ignore_merges=splitting.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: int | None, prefix: bool
) -> Backend:
    """SentencePiece writes ``▁`` for a space and, with ``prefix``, one before the text (and after a special token)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Converters store runs of spaces as user-defined tokens spelled with real spaces; to the model they are runs of ▁,
    # and they were merged before everything else, shortest first.
    runs = {
        i: SPACE * len(t)
        for i, t in enumerate(tokens)
        if types[i] == TokenType.USER_DEFINED and _is_spaces(t)
    }
    if runs:
        tokens = list(tokens)
        for index, spelled in runs.items():
            tokens[index] = spelled
    vocab = _vocabulary(tokens, types)
    first = math.inf
    scored = [
        (token, first if kind == TokenType.USER_DEFINED else score)
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED) and len(token) > 1
    ]
    merges = merges_by_score(vocab, scored)
    unk = tokens[unknown] if unknown is not None else None
    backend = Tokenizer(_bpe(models.BPE, vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _add_tokens(
    backend: Backend, tokens: Sequence[str], types: Sequence[int], special: set[int], coding: ByteCoding
) -> None:
    """Make special tokens and user-defined ones match as a whole in the text."""
    from tokenizers import AddedToken

    for index in special:
        if not tokens[index]:
            raise FormatError(f"the special token {index} is empty", field=_KEY + "tokens")
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    )
    plain = []
    for index, kind in enumerate(types):
        if kind != TokenType.USER_DEFINED or index in special:
            continue
        if not tokens[index]:
            raise FormatError(f"the user-defined token {index} is empty", field=_KEY + "tokens")
        if coding is ByteCoding.BYTE_FALLBACK and _is_spaces(tokens[index]):
            continue
        plain.append(AddedToken(tokens[index], special=False, normalized=False))
    backend.add_tokens(plain)


def _bpe(
    model: Any, vocab: dict[str, int], merges: list[tuple[str, ...]] | list[tuple[str, str]], **options: Any
) -> Any:
    try:
        return model(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge whose parts are no tokens
        raise FormatError(
            f"the merges do not fit the tokens ({str(error)[:120]})", field=_KEY + "merges"
        ) from error


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    if TokenType.UNUSED in types:  # padding rows of the embedding: no text gives them
        return {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    return {token: i for i, token in enumerate(tokens)}


def _known(types: Sequence[int]) -> int:
    known = len(types)
    while known and types[known - 1] == TokenType.UNUSED:
        known -= 1
    return known


def _is_spaces(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_KEY + key)
    if values is None:
        raise FormatError("missing", field=_KEY + key)
    values = list(values)
    if not all(type(value) is str for value in values):
        raise FormatError("must be an array of strings", field=_KEY + key)
    return values


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    values = metadata.get(_KEY + "token_type")
    if values is None:
        return [TokenType.NORMAL] * count
    return [int(value) for value in _numbers(values, "token_type", count)]


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    values = metadata.get(_KEY + "scores")
    if values is None:
        raise FormatError("missing", field=_KEY + "scores")
    scores = [float(value) for value in _numbers(values, "scores", count)]
    if any(map(math.isnan, scores)):
        raise FormatError("holds NaN", field=_KEY + "scores")
    return scores


def _numbers(values: Any, key: str, count: int) -> list[Any]:
    numbers: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(numbers) != count:
        raise FormatError(f"has {len(numbers)} entries for {count} tokens", field=_KEY + key)
    if not all(isinstance(value, int | float) for value in numbers):
        raise FormatError("must be an array of numbers", field=_KEY + key)
    return numbers


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(_KEY + key)
    if value is None or value == 0xFFFFFFFF:  # converters write -1 for "none"
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < count:
        raise FormatError(f"{str(value)[:40]} is not a token id; there are {count} tokens", field=_KEY + key)
    return int(value)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_KEY + key, default)
    if not isinstance(value, bool):
        raise FormatError(f"must be true or false, got {str(value)[:40]}", field=_KEY + key)
    return value
