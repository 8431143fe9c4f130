"""WordPiece from GGUF metadata against the tokenizer.json that it was converted from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from toque.errors import FormatError
from toque.text.tokenizer import load_tokenizer

TEXTS = [
    "",
    "Hello world, tokenization!",
    "Ünïcode, CJK 漢字, emoji 🙂 and a\tcontrol \x00 character — with punctuation… [MASK] it",
    "a" * 200,
    "unaffable unknownwordabcxyzq 123,456.78 don't",
]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", "play", "##ing", "Play", "##ed", "s", "##s"]


def metadata_of(vocab: list[str], special: set[str], *, old: bool = False, **keys: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes: ▁ at the beginning of words, ## taken off everywhere else."""

    def spelled(token: str) -> str:
        if token in special or (old and token[0] == "[" and token[-1] == "]"):
            return token
        return token[2:] if token.startswith("##") else f"\u2581{token}"

    metadata = {
        "model": "bert",
        "tokens": [spelled(token) for token in vocab],
        "token_type": np.array([3 if token in special else 1 for token in vocab], np.int32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def load(metadata: dict[str, Any]) -> Any:
    return load_tokenizer(SimpleNamespace(metadata=metadata, folder=None, path=None))  # type: ignore[arg-type]


@pytest.mark.model
def test_encodings_equal_those_of_the_tokenizer_that_was_converted(minilm: Path) -> None:
    path = minilm / "tokenizer.json"
    theirs = Backend.from_file(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    vocab = json.loads(path.read_text())["model"]["vocab"]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    for old in (False, True):
        ours = load(metadata_of(sorted(vocab, key=vocab.get), special, old=old, cls_token_id=101))
        for text in TEXTS:
            for add_special in (True, False):
                expected = theirs.encode(text, add_special_tokens=add_special)
                ids = ours.encode(text, add_special=add_special)
                assert ids == expected.ids
                assert ours.decode(ids) == theirs.decode(ids)
        assert ours.vocab_size == len(vocab)
        assert ours.is_special(101)


@pytest.mark.parametrize(("cased", "ids"), [(True, [2, 7, 6, 3]), (False, [2, 5, 6, 3])])
def test_a_vocabulary_without_upper_case_is_for_lower_cased_text(cased: bool, ids: list[int]) -> None:
    vocab = VOCAB if cased else [token.lower() if token[0] != "[" else token for token in VOCAB]
    assert (
        load(metadata_of(vocab, {"[PAD]", "[UNK]", "[CLS]", "[SEP]"})).encode("Playing", add_special=True)
        == ids
    )


def test_a_vocabulary_without_a_beginning_is_refused() -> None:
    with pytest.raises(FormatError, match=r"\[CLS\]"):
        load(metadata_of([token for token in VOCAB if token != "[CLS]"], {"[PAD]", "[UNK]", "[SEP]"}))
