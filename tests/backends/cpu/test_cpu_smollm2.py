"""The real model: logits against the float reference on the same file, and the promise on real weights."""

from __future__ import annotations

import heapq
import statistics
from pathlib import Path

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, prefill_logits
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.text.template import load_template
from toque.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model
POSITIONS = 200
GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2_logits.npz"


@pytest.fixture(scope="module")
def checkpoint(smollm2):
    return load_checkpoint(smollm2)


@pytest.fixture(scope="module")
def tokens(checkpoint):
    text = (heapq.__about__ + (statistics.__doc__ or "")).strip()
    return load_tokenizer(checkpoint).encode(text, add_special=True)[:POSITIONS]


@pytest.fixture(scope="module")
def cpu(checkpoint):
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
    executable = CpuBackend().lower(graph, checkpoint, BackendOptions(2, max_sequences=256))
    executable.allocate_kv(40)
    return executable


def test_logits_are_closer_to_the_float_model_than_llama_cpp(cpu):
    """Over 500 positions llama.cpp has, on the same file, a mean KL of 0.00307 and a top-1 agreement of 0.958.

    Measured here: 0.00056 and 0.984 (benchmarks/accuracy.py); 0.00047 by this test's measure, which knows only the 64
    likeliest tokens and is a lower bound. The bounds leave room for another processor's rounding.
    """
    with np.load(GOLDEN) as golden:
        tokens, ids, p = (
            golden["tokens"].tolist(),
            golden["ids"].astype(int),
            golden["logprobs"].astype(float),
        )
    logits = prefill_logits(cpu, tokens, chunk=250).astype(float)
    q = np.take_along_axis(logits, ids, 1) - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    others = [np.log1p(-np.exp(x).sum(axis=1).clip(max=1 - 1e-9)) for x in (p, q)]
    divergence = (np.exp(p) * (p - q)).sum(axis=1) + np.exp(others[0]) * (others[0] - others[1])
    assert divergence.mean() < 0.0008
    assert divergence.max() < 0.01
    assert (ids[:, 0] == logits.argmax(1)).mean() >= 0.97


def test_a_narrow_choice_falls_as_in_the_float_model(checkpoint, cpu):
    """Float logits prefer "The" to "L" by 0.08 at the answer's first token, less than plain int8 activations keep."""
    tokenizer = load_tokenizer(checkpoint)
    template = load_template(checkpoint, tokenizer)
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    logits = prefill_logits(cpu, tokenizer.encode(prompt, add_special=False))
    assert tokenizer.token_text(int(logits[-1].argmax())) == "The"


def test_batch_chunks_and_blocks_change_no_bit(tokens, cpu):
    alone = prefill_logits(cpu, tokens)
    others = [(tokens[i : i + n], 0, [20 + i]) for i, n in enumerate((1, 5, 17, 31))]
    cut = []
    for start, end in ((0, 61), (61, 62), (62, 190), (190, POSITIONS)):
        batch = batch_of([*others[:2], (tokens[start:end], start, [35, 9, 30, 11, 38, 2, 33]), *others[2:]])
        cut.append(cpu.logits(batch)[batch.starts[2] : batch.starts[3]])
    np.testing.assert_array_equal(np.concatenate(cut), alone)
