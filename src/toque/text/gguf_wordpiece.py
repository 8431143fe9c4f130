"""WordPiece vocabularies in GGUF (``tokenizer.ggml.model`` is ``bert``), for encoders.

Converters spell them like SentencePiece's: a token that begins a word has a ``▁`` before it, one that continues a word
lost its ``##``, and special tokens are as they were. Casing is not stated; a vocabulary in which nothing is upper case
was made for lower-cased text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toque.errors import FormatError
from toque.text.byte_alphabet import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LONGEST_WORD = 100  # characters; a longer one is unknown, in every BERT


def wordpiece(
    tokens: Sequence[str], special: set[int], cls: int | None, sep: int | None, unk: int | None
) -> Backend:
    """The encoder whose ``add_special_tokens`` wraps a text in ``cls`` and ``sep``.

    Where an id is None, the token that BERT calls by its usual name is meant. Raises FormatError without one.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    spelled = [token if i in special else _spelled(token) for i, token in enumerate(tokens)]
    vocab = {token: i for i, token in reversed(list(enumerate(spelled)))}  # of twins the first counts
    cls, sep, unk = (
        _named(vocab, name, given) for name, given in (("[CLS]", cls), ("[SEP]", sep), ("[UNK]", unk))
    )
    backend = Tokenizer(
        models.WordPiece(vocab, unk_token=spelled[unk], max_input_chars_per_word=_LONGEST_WORD)
    )
    cased = any(
        token != token.lower() for i, token in enumerate(spelled) if i not in special and token[:1] != "["
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=[spelled[cls], "$A", spelled[sep]],
        pair=[spelled[cls], "$A", spelled[sep], "$B:1", f"{spelled[sep]}:1"],
        special_tokens=[(spelled[cls], cls), (spelled[sep], sep)],
    )
    return backend


def _spelled(token: str) -> str:
    if token.startswith(SPACE):
        return token[1:]
    if len(token) > 2 and token[0] == "[" and token[-1] == "]":  # the first converters left [unused1] alone
        return token
    return f"##{token}"


def _named(vocab: dict[str, int], name: str, given: int | None) -> int:
    found = vocab.get(name) if given is None else given
    if found is None:
        raise FormatError(f"there is no {name}", field="tokenizer.ggml.tokens")
    return found
