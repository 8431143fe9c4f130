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


def lowered(checkpoint, kv_dtype="auto"):
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
    executable = CpuBackend().lower(
        graph, checkpoint, BackendOptions(2, max_sequences=256, kv_dtype=kv_dtype)
    )
    executable.allocate_kv(40)
    return executable


@pytest.fixture(scope="module")
def cpu(checkpoint):
    return lowered(checkpoint)


@pytest.mark.parametrize(
    ("kv_dtype", "mean", "top", "agreeing"), [("auto", 0.0008, 0.01, 0.97), ("int8", 0.0016, 0.04, 0.955)]
)
def test_logits_are_closer_to_the_float_model_than_llama_cpp(checkpoint, kv_dtype, mean, top, agreeing):
    """Over 500 positions llama.cpp has, on the same file, a mean KL of 0.00307 and a top-1 agreement of 0.958.

    Measured here: 0.00056 and 0.984 (benchmarks/accuracy.py); 0.00047 by this test's measure, which knows only the 64
    likeliest tokens and is a lower bound. With an int8 cache: 0.00110 and 0.974. The bounds leave room for another
    processor's rounding.
    """
    cpu = lowered(checkpoint, kv_dtype)
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
    assert divergence.mean() < mean
    assert divergence.max() < top
    assert (ids[:, 0] == logits.argmax(1)).mean() >= agreeing


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
