"""An embedding model, served: its replica makes vectors, and near texts have near vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from .server import Server, serving

pytestmark = pytest.mark.model
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "models" / "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def minilm() -> Iterator[Server]:
    if not FOLDER.exists():
        pytest.skip("all-MiniLM-L6-v2 is not here")
    with serving(FOLDER, name="minilm", backend="cpu") as running:
        yield running


def test_near_texts_have_near_vectors(minilm: Server) -> None:
    with minilm.client() as client:
        texts = ["A cat sat on the mat.", "A kitten rested on a rug.", "Stocks fell sharply on Monday."]
        answer = client.embeddings.create(model="minilm", input=texts)
        vectors = np.array([item.embedding for item in answer.data])
        assert vectors.shape == (3, 384)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
        near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
        assert near > far + 0.3
        alone = client.embeddings.create(model="minilm", input=texts[1], encoding_format="float")
        assert alone.data[0].embedding == answer.data[1].embedding, "company changes nothing, not one bit"
        short = client.embeddings.create(model="minilm", input=texts[0], dimensions=64).data[0].embedding
        assert len(short) == 64
        assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="at most 256"):
            client.embeddings.create(model="minilm", input="word " * 600)
        with pytest.raises(openai.BadRequestError, match="makes embeddings"):
            client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "x"}])
        assert [model.id for model in client.models.list()] == ["minilm"]


def test_ranking_finds_the_answer(minilm: Server) -> None:
    documents = ["The market fell on Monday.", "Cats purr when they are content.", "Rain is expected."]
    answer = minilm.post("/v1/rerank", query="Which animals purr?", documents=documents, top_n=2).json()
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"] + 0.2
    assert len(answer["results"]) == 2
