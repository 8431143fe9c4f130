"""How far each engine's logits are from the float reference on the same file: top-1 agreement and mean KL.

    python benchmarks/accuracy.py [--positions 500] [--model SmolLM2-135M-Instruct.Q4_1.gguf]

The reference is the numpy backend on the dequantized weights. The text is the standard library's own documentation.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
from pathlib import Path

import numpy as np

from toque.backends import load_backend
from toque.backends.base import BLOCK_SIZE, BackendOptions, StepBatch
from toque.formats import load_checkpoint
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer
from workers import ENGINES, ROOT, Worker


def reference_logits(path: Path, tokens: list[int]) -> np.ndarray:
    checkpoint = load_checkpoint(path)
    graph = build_graph(checkpoint.config, checkpoint.tensors)
    executable = load_backend("reference").lower(
        graph, checkpoint, BackendOptions(max_batch_tokens=len(tokens))
    )
    blocks = -(-len(tokens) // BLOCK_SIZE)
    executable.allocate_kv(blocks + 1)
    count = len(tokens)

    def ints(values: object) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.int32)

    return executable.logits(
        StepBatch(
            tokens=ints(tokens), positions=ints(range(count)), starts=ints([0, count]), context=ints([count]),
            block_tables=ints([range(1, blocks + 1)]), rows=ints(range(count)), slots=ints([0] * count),
            targets=ints([0] * count), top=ints([-1] * count),
        )
    )  # fmt: skip


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def agreement(reference: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """KL(reference || other) in nats, mean and largest over positions; share of equal top-1; mean |logit error|."""
    p, q = log_softmax(reference), log_softmax(other)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    top = float(np.mean(reference.argmax(-1) == other.argmax(-1)))
    return {"mean_kl": float(kl.mean()), "max_kl": float(kl.max()), "top1": top}


def sample_text() -> str:
    return (heapq.__about__ + (statistics.__doc__ or "") + (argparse.__doc__ or "")).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--positions", type=int, default=500)
    options = parser.parse_args()
    path = Path(options.model)
    if not path.exists():
        path = ROOT / ".cache" / "models" / options.model
    tokens = load_tokenizer(load_checkpoint(path)).encode(sample_text(), add_special=True)[
        : options.positions
    ]
    reference = reference_logits(path, tokens)
    threads = len(os.sched_getaffinity(0))
    print(f"{path.name}, {len(tokens)} positions; against the float reference:")
    for name in ("toque", "llama.cpp"):
        worker = Worker(ENGINES[name], path, threads, 2048, 1)
        file = Path(worker.ask({"op": "logits", "tokens": tokens})["path"])
        logits = np.load(file)[:, : reference.shape[1]]
        file.unlink()
        worker.close()
        a = agreement(reference, logits)
        print(f"{name:<10} top-1 {a['top1']:.4f}  mean KL {a['mean_kl']:.6f}  max KL {a['max_kl']:.5f}")


if __name__ == "__main__":
    main()
