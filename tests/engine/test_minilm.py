"""all-MiniLM-L6-v2 as it was published, against transformers with the recipe of its model card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import model_file
from fixtures.encoders import hf_embedding
from toque import LLM
from toque.engine.embedding import load_embedding_engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, UnsupportedModelError
from toque.formats import load_checkpoint
from toque.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "This is an example sentence",
    "Each sentence is converted",
    "Ünïcode, CJK 漢字 and emoji 🙂 — with punctuation!",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_file("all-MiniLM-L6-v2")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_vectors_equal_transformers(backend, folder):
    from transformers import AutoTokenizer, BertModel

    checkpoint = load_checkpoint(folder)
    tokenizer, theirs = load_tokenizer(checkpoint), AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    assert ids == [theirs(text)["input_ids"] for text in TEXTS]
    engine = load_embedding_engine(checkpoint, EngineOptions(backend=backend))
    assert (engine.dimension, engine.context_length) == (384, 256)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    expected = np.stack([hf_embedding(model, each) for each in ids])
    np.testing.assert_allclose(engine.embed(ids), expected, atol=1e-3, rtol=0)


def test_the_library_embeds_texts(folder):
    """The nearest text by meaning shares no word with the question."""
    with LLM(folder, backend="reference") as llm:
        texts = [
            "How do I bake bread?",
            "Knead the dough and let it rise",
            "The stock market fell",
            "Cars need fuel",
        ]
        vectors = llm.embed(texts)
        assert vectors.shape == (4, 384)
        assert np.argmax(vectors[1:] @ vectors[0]) == 0
        np.testing.assert_allclose(llm.embed(texts[0]), vectors[0], atol=1e-6)
        assert llm.embed(texts, dimensions=64).shape == (4, 64)
        with pytest.raises(ContextLengthError):
            llm.embed("word " * 300)
        with pytest.raises(UnsupportedModelError, match="was made for embeddings and generates no text"):
            llm.generate("Hello")


def test_a_model_that_generates_refuses_to_embed(smollm2):
    llm = LLM(smollm2, backend="reference", kv_blocks=4)
    with llm, pytest.raises(UnsupportedModelError, match="generates text"):
        llm.embed(["Hello"])
    with pytest.raises(UnsupportedModelError, match="was made for embeddings"):
        load_engine(model_file("all-MiniLM-L6-v2"))
