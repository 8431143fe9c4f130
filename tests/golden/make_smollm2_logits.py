"""Makes smollm2_logits.npz: the float reference's logits at 500 positions of real text, in brief.

::

    PYTHONPATH=tests python tests/golden/make_smollm2_logits.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

The text is the standard library's documentation, as in `benchmarks/accuracy.py`; the reference is the numpy backend on
the dequantized weights, which agrees with transformers to 1e-3 (see smollm2.json). Per position: the ids and the
log-probabilities of the 64 likeliest tokens; a KL over these, with "any other" as one more event, is a lower bound of
the full one.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from pathlib import Path

import numpy as np

from fixtures.checkpoints import prefill_logits
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.formats import load_checkpoint
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer

POSITIONS = 500
TOP = 64


def main(path: Path) -> None:
    checkpoint = load_checkpoint(path)
    text = (heapq.__about__ + (statistics.__doc__ or "") + (argparse.__doc__ or "")).strip()
    tokens = load_tokenizer(checkpoint).encode(text, add_special=True)[:POSITIONS]
    graph = build_graph(checkpoint.config, checkpoint.tensors)
    reference = ReferenceBackend().lower(graph, checkpoint, BackendOptions(max_sequences=POSITIONS))
    reference.allocate_kv(POSITIONS // 32 + 2)
    logits = prefill_logits(reference, tokens).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    top = np.argsort(-logprobs, axis=1, kind="stable")[:, :TOP]
    np.savez_compressed(
        Path(__file__).with_name("smollm2_logits.npz"),
        tokens=np.asarray(tokens, np.uint16),
        ids=top.astype(np.uint16),
        logprobs=np.take_along_axis(logprobs, top, axis=1).astype(np.float32),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
