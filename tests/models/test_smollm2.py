"""The real SmolLM2 file on the reference backend, against transformers and against the stored golden values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, prefill_logits
from fixtures.hf import hf_logits, model_from_gguf
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2.json").read_text())

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def executable(smollm2):
    checkpoint = load_checkpoint(smollm2)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    made = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    made.allocate_kv(8)
    yield made
    made.close()


@pytest.fixture(scope="module")
def text_logits(executable):
    return prefill_logits(executable, GOLDEN["text_ids"])


def test_logits_on_real_text_equal_transformers_at_every_position(smollm2, text_logits):
    """Weights dequantized by two independent readers, both models in float32."""
    expected = hf_logits(model_from_gguf(smollm2), GOLDEN["text_ids"])
    np.testing.assert_allclose(text_logits, expected, atol=1e-3, rtol=0)


def test_best_logits_equal_the_golden_ones(text_logits):
    for row in GOLDEN["top"]:
        logits = text_logits[row["position"]]
        np.testing.assert_allclose(logits[row["ids"]], row["logits"], atol=1.1e-3, rtol=0)
        assert int(np.argmax(logits)) == row["ids"][0]


def test_real_text_is_likely():
    """Guards against a mistake that transformers would share, such as a wrong order of heads in the file's reader."""
    likely = [row["logits"][0] - row["logits"][-1] for row in GOLDEN["top"]]
    assert np.mean(likely) > 4.0
    assert GOLDEN["answer"].startswith("The capital of France is Paris")


def test_greedy_answer_equals_the_golden_one(executable):
    """Every token of the answer is the best one after those before it, all positions in one batch."""
    prompt, answer = GOLDEN["chat_ids"], GOLDEN["answer_ids"]
    tokens = prompt + answer[:-1]
    rows = list(range(len(prompt) - 1, len(tokens)))
    logits = executable.logits(batch_of([(tokens, 0, [5, 3])], rows=rows))
    assert np.argmax(logits, axis=-1).tolist() == answer
