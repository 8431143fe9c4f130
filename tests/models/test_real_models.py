"""gemma-3-270m and Qwen2.5-Coder-0.5B as GGUF against stored values of transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures.checkpoints import batch_of
from toque.backends import load_backend
from toque.backends.base import BackendOptions
from toque.backends.reference.sampler import log_softmax
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "real_files.json").read_text())

pytestmark = pytest.mark.model


def golden_and_logits(path, backend):
    """The stored rows, and this backend's logits at the same positions."""
    golden, checkpoint = GOLDEN[path.name], load_checkpoint(path)
    executable = load_backend(backend).lower(
        fuse(build_graph(checkpoint.config, checkpoint.tensors.keys())),
        checkpoint,
        BackendOptions(threads=2, max_batch_tokens=64, max_sequences=16),
    )
    executable.allocate_kv(2)
    rows = [row["position"] for row in golden["top"]]
    logits = executable.logits(batch_of([(golden["text_ids"], 0, [1, 0])], rows=rows))
    executable.close()
    return golden, logits


@pytest.mark.slow
def test_gemma3_on_the_reference_equals_transformers(gemma3):
    """Field case BR-057: logits and logprobs, so that a scaled output matrix or a missed cap would show."""
    golden, logits = golden_and_logits(gemma3, "reference")
    for row, ours in zip(golden["top"], logits, strict=True):
        np.testing.assert_allclose(ours[row["ids"]], row["logits"], atol=1e-3)
        np.testing.assert_allclose(log_softmax(ours)[row["ids"]], row["logprobs"], atol=1e-3)
        assert int(np.argmax(ours)) == row["ids"][0]


@pytest.mark.parametrize("name", ["gemma3", "qwen"])
def test_real_files_on_the_cpu_backend_agree_with_transformers(name, request):
    """As far as int8 activations go."""
    golden, logits = golden_and_logits(request.getfixturevalue(name), "cpu")
    errors = [
        np.abs(log_softmax(ours)[row["ids"]] - row["logprobs"]).mean()
        for row, ours in zip(golden["top"], logits, strict=True)
    ]
    assert np.mean(errors) < 0.15
    best = [int(np.argmax(ours)) == row["ids"][0] for row, ours in zip(golden["top"], logits, strict=True)]
    assert np.mean(best) >= 0.75
    assert best[-1]


@pytest.mark.parametrize("name", ["gemma3", "qwen"])
def test_the_stored_text_still_gives_the_stored_ids(name, request):
    path = request.getfixturevalue(name)
    golden = GOLDEN[path.name]
    assert (
        load_tokenizer(load_checkpoint(path)).encode(golden["text"], add_special=True) == golden["text_ids"]
    )
