"""all-MiniLM-L6-v2 as it was published, against transformers with the recipe of its model card."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.encoders import hf_embedding, write_bert_gguf
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_vectors_equal_transformers(backend, minilm):
    from transformers import AutoTokenizer, BertModel

    checkpoint = load_checkpoint(minilm)
    tokenizer, theirs = load_tokenizer(checkpoint), AutoTokenizer.from_pretrained(minilm)
    ids = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    assert ids == [theirs(text)["input_ids"] for text in TEXTS]
    engine = load_embedding_engine(checkpoint, EngineOptions(backend=backend))
    assert (engine.dimension, engine.context_length) == (384, 256)
    model = BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    expected = np.stack([hf_embedding(model, each) for each in ids])
    np.testing.assert_allclose(engine.embed(ids), expected, atol=1e-3, rtol=0)


def test_the_library_embeds_texts(minilm):
    """The nearest text by meaning shares no word with the question."""
    with LLM(minilm, backend="reference") as llm:
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
        with pytest.raises(UnsupportedModelError, match="was made for embeddings"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(UnsupportedModelError, match="was made for embeddings and generates no text"):
            llm.generate("Hello")


def test_a_model_that_generates_refuses_to_embed(smollm2, minilm):
    llm = LLM(smollm2, backend="reference", kv_blocks=4)
    with llm, pytest.raises(UnsupportedModelError, match="generates text"):
        llm.embed(["Hello"])
    with pytest.raises(UnsupportedModelError, match="was made for embeddings"):
        load_engine(minilm)


@pytest.mark.parametrize(("kind", "least"), [("F16", 0.99999), ("Q8_0", 0.998), ("Q4_1", 0.95)])
def test_smaller_weights_turn_vectors_by_little(kind, least, minilm, tmp_path):
    from transformers import BertModel

    model = BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    path = write_bert_gguf(model, tmp_path / "model.gguf", kind=kind)
    tokenizer = load_tokenizer(load_checkpoint(minilm))
    ids = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    vectors = load_embedding_engine(path, EngineOptions(threads=2)).embed(ids)
    cosines = np.sum(vectors * np.stack([hf_embedding(model, each) for each in ids]), axis=1)
    assert cosines.min() > least
