"""SentencePiece vocabularies in GGUF form, against the sentencepiece library itself."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from strings import texts

from toque.errors import UnsupportedModelError
from toque.text.gguf_export import gguf_tokenizer
from toque.text.gguf_tokenizer import tokenizer_from_gguf
from toque.text.spm_merges import merges_by_score
from toque.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def trained() -> Any:
    """A tiny BPE model as Llama's was trained: byte fallback, identity normalisation, a dummy prefix."""
    lines = [
        "the quick brown fox jumps over the lazy dog and  the other one",
        "il était une fois à la maison 12345 Hello world, it's a b_c == d.e(f) <x>   {}",
        "tokenization of brutalist cafés, 日本語 and 中文    mixed",
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_writer=model,
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(model: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a SentencePiece model."""
    count = model.get_piece_size()

    def kind(index: int) -> int:
        for number, test in (
            (2, model.is_unknown),
            (3, model.is_control),
            (6, model.is_byte),
            (5, model.is_unused),
        ):
            if test(index):
                return number
        return 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in range(count)],
        "tokenizer.ggml.scores": [model.get_score(index) for index in range(count)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(count)],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


@pytest.fixture(scope="module")
def tokenizer(trained: Any) -> Tokenizer:
    return tokenizer_from_gguf(metadata_of(trained))


def test_encodes_like_sentencepiece(trained: Any, tokenizer: Tokenizer) -> None:
    # Written-out control tokens are text to sentencepiece, ids to a chat tokenizer.
    given = [
        text
        for text in texts(3000, seed=5)
        if not any(mark in text for mark in ("<s>", "</s>", "<unk>", "\x00"))
    ]
    wrong = [text for text in given if tokenizer.encode(text, add_special=False) != trained.encode(text)]
    assert wrong == []
    assert tokenizer.encode("the fox", add_special=True) == [trained.bos_id(), *trained.encode("the fox")]


def test_decodes_like_sentencepiece(trained: Any, tokenizer: Tokenizer) -> None:
    for text in texts(500, seed=6):
        ids = trained.encode(text)
        assert tokenizer.decode(ids) == trained.decode(ids)


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in texts(500, seed=8):
        ids = tokenizer.encode(text, add_special=False)
        if not any(map(tokenizer.is_special, ids)):
            # ▁ itself is a space to SentencePiece.
            assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_folder_of_that_vocabulary_becomes_gguf_again(trained: Any, prefix: bool, tmp_path: Path) -> None:
    """The scores are another numbering of the same order."""
    metadata = metadata_of(trained) | {"tokenizer.ggml.add_space_prefix": prefix}
    source = tokenizer_from_gguf(metadata)
    source._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    count = trained.get_piece_size()
    written = {key: value for key, (_, value) in gguf_tokenizer(tmp_path, count + 3).items()}
    assert written["tokenizer.ggml.model"] == "llama"
    assert written["tokenizer.ggml.token_type"][:count].tolist() == metadata["tokenizer.ggml.token_type"]
    assert written["tokenizer.ggml.token_type"][count:].tolist() == [5, 5, 5]
    again = tokenizer_from_gguf(written)
    assert again.add_bos
    for text in texts(1000, seed=9):
        assert again.encode(text, add_special=True) == source.encode(text, add_special=True)


def test_merges_that_no_scores_give_are_refused(trained: Any, tmp_path: Path) -> None:
    tokenizer_from_gguf(metadata_of(trained))._backend.save(str(tmp_path / "tokenizer.json"))
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["merges"] = described["model"]["merges"][
        ::7
    ]  # most pieces are made by nothing any more
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModelError, match="would encode otherwise"):
        gguf_tokenizer(tmp_path, trained.get_piece_size())


def test_without_a_prefix_space(trained: Any) -> None:
    tokenizer = tokenizer_from_gguf(metadata_of(trained) | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.token_bytes(tokenizer.encode("the", add_special=False)[0])[:1] == b"t"
    assert tokenizer.decode(tokenizer.encode(" the", add_special=False)) == " the"


@pytest.mark.parametrize("slot_bits", [22, 2])  # with four slots, every look-up meets several words
def test_merges_equal_a_plain_search(slot_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.text.spm_merges._SLOT_BITS", slot_bits)
    chance = random.Random(1)
    for _ in range(50):
        pieces = list({"".join(chance.choice("ab▁") for _ in range(chance.randint(1, 6))) for _ in range(40)})
        scores = [float(-chance.randint(0, 8)) for _ in pieces]
        vocab = {piece: index for index, piece in enumerate(pieces)}
        plain = []
        for place, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    plain.append((-score, -len(left), -len(right), place, (left, right)))
        assert merges_by_score(vocab, pieces, scores) == [entry[-1] for entry in sorted(plain)]


def test_no_pieces_no_merges() -> None:
    assert merges_by_score({}, [], []) == []
    assert merges_by_score({"a": 0}, ["a"], [0.0]) == []
