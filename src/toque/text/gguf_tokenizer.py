"""A tokenizer from a GGUF file's metadata.

Two kinds exist among language models: ``gpt2`` (byte-level BPE with a merge list) and ``llama`` (SentencePiece BPE with
scores and byte fallback). Both become a `tokenizers` BPE model whose encodings equal those of the tokenizer that the
file was converted from. Encoders have ``bert``, see `toque.text.gguf_wordpiece`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.strings import StringArray
from toque.text.byte_alphabet import SPACE, ByteCoding, coverage
from toque.text.end_tokens import turn_end_ids
from toque.text.pre_tokenizers import Splitting, splitting_of
from toque.text.spm_merges import merges_by_score
from toque.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

Types = npt.NDArray[np.float64]  # one TokenType a token

_KEY = "tokenizer.ggml."
_FIRST = 1e9  # above any score


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
        complete, dropped = coverage(set(tokens))
    elif kind == "llama":
        degraded = None
        prefix = _flag(metadata, "add_space_prefix", True)
        backend = _sentencepiece(tokens, types, _scores(metadata, len(tokens)), named["unk_token"], prefix)
        coding, strip, add_bos = ByteCoding.BYTE_FALLBACK, prefix, True
        dropped = ""
        complete = len(_of_type(types, TokenType.BYTE)) == 256
    elif kind == "bert":
        return _encoder(metadata, tokens, types, named)
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model {str(kind)[:40]!r} is not supported; supported are gpt2, llama and bert",
            param=_KEY + "model",
        )
    special = set(_of_type(types, TokenType.CONTROL)) | set(_of_type(types, TokenType.UNKNOWN))
    special.update(token for token in (*named.values(), *turn_ends) if token is not None)
    _add_tokens(backend, tokens, types, special, coding)

    template = metadata.get("tokenizer.chat_template")
    ends = {token for token in (named["eos_token"], *turn_ends) if token is not None}
    marked = {tokens[index]: index for index in (*special, *_of_type(types, TokenType.USER_DEFINED))}
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
        dropped=dropped,
        degraded=degraded,
    )


def _encoder(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Types, named: Mapping[str, int | None]
) -> Tokenizer:
    from toque.text.gguf_wordpiece import wordpiece

    special = set(_of_type(types, TokenType.CONTROL)) | set(_of_type(types, TokenType.UNKNOWN))
    cls, sep = (
        _token_id(metadata, key, len(tokens)) for key in ("cls_token_id", "seperator_token_id")
    )  # GGUF spells it so
    marks = (
        cls if cls is not None else named["bos_token"],
        sep if sep is not None else named["eos_token"],
        named["unk_token"],
    )
    special.update(token for token in (*named.values(), *marks) if token is not None)
    backend = wordpiece(tokens, special, *marks)
    _add_tokens(backend, tokens, types, special, ByteCoding.OTHER)
    return Tokenizer(
        backend,
        coding=ByteCoding.OTHER,
        vocab_size=_known(types),
        special_ids=frozenset(special),
        eos_ids=frozenset(),
    )


def _byte_level(
    tokens: Sequence[str], types: Types, merge_lines: Sequence[str], splitting: Splitting
) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = _vocabulary(tokens, types)
    merges = [line.partition(" ")[::2] for line in merge_lines]  # (left, right)
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
    tokens: Sequence[str], types: Types, scores: npt.NDArray[np.float64], unknown: int | None, prefix: bool
) -> Backend:
    """SentencePiece writes ``▁`` for a space and, with ``prefix``, one before the text (and after a special token)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Converters store runs of spaces as user-defined tokens spelled with real spaces; to the model they are runs of ▁,
    # and they are merged before everything else, in the order of the file (Gemma has up to 31 spaces).
    # and they are merged before everything else, in the order of the file (Gemma has up to 31 spaces).
    defined = _of_type(types, TokenType.USER_DEFINED)
    tokens = list(tokens)
    for index in defined:
        if _is_spaces(tokens[index]):
            tokens[index] = SPACE * len(tokens[index])
    vocab = _vocabulary(tokens, types)
    ranks = scores.copy()
    ranks[defined] = _FIRST - np.asarray(defined, dtype=np.float64)
    joined = np.flatnonzero((types == TokenType.NORMAL) | (types == TokenType.USER_DEFINED))
    merges = merges_by_score(vocab, [tokens[i] for i in joined.tolist()], ranks[joined])
    unk = tokens[unknown] if unknown is not None else None
    backend = Tokenizer(_bpe(models.BPE, vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _add_tokens(
    backend: Backend, tokens: Sequence[str], types: Types, special: set[int], coding: ByteCoding
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
    for index in _of_type(types, TokenType.USER_DEFINED):
        if index in special:
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


def _vocabulary(tokens: Sequence[str], types: Types) -> dict[str, int]:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    for index in _of_type(types, TokenType.UNUSED):  # padding rows of the embedding: no text gives them
        if vocab.get(tokens[index]) == index:
            del vocab[tokens[index]]
    return vocab


def _known(types: Types) -> int:
    used = np.flatnonzero(types != TokenType.UNUSED)
    return int(used[-1]) + 1 if len(used) else 0


def _of_type(types: Types, kind: TokenType) -> list[int]:
    found: list[int] = np.flatnonzero(types == kind).tolist()
    return found


def _is_spaces(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_KEY + key)
    if values is None:
        raise FormatError("missing", field=_KEY + key)
    if isinstance(values, StringArray):
        return values.strings()
    strings = list(values)
    if not set(map(type, strings)) <= {str}:
        raise FormatError("must be an array of strings", field=_KEY + key)
    return strings


def _types(metadata: Mapping[str, Any], count: int) -> Types:
    if metadata.get(_KEY + "token_type") is None:
        return np.full(count, TokenType.NORMAL, dtype=np.float64)
    return _numbers(metadata, "token_type", count)


def _scores(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.float64]:
    scores = _numbers(metadata, "scores", count)
    if np.isnan(scores).any():
        raise FormatError("holds NaN", field=_KEY + "scores")
    return scores


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> npt.NDArray[np.float64]:
    values = metadata.get(_KEY + key)
    if values is None:
        raise FormatError("missing", field=_KEY + key)
    if len(values) != count:
        raise FormatError(f"has {len(values)} entries for {count} tokens", field=_KEY + key)
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FormatError("must be an array of numbers", field=_KEY + key) from error


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
