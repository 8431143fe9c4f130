"""What an int8 KV cache costs and gains: accuracy, memory, and speed beside the 16-bit one.

    python benchmarks/kv_cache.py [--rounds 5] [--model SmolLM2-135M-Instruct.Q4_1.gguf ...]

Accuracy is the mean KL and top-1 agreement of each against the float reference on the same file (accuracy.py). Speed
is decoding at batch 1 and 16 after contexts of several lengths, and a prefill, both caches by turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from accuracy import agreement, reference_logits, sample_text
from toque.backends.base import BLOCK_SIZE, BackendOptions, Executable, StepBatch
from toque.backends.cpu import CpuBackend
from toque.formats import load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer
from toque.types import SamplingParams
from workers import ROOT

KINDS = ("auto", "int8")
CHUNK = 512
STEPS = 8


def ints(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


def batch(tokens: list[list[int]], position: int, tables: np.ndarray) -> StepBatch:
    """Equally long pieces of several sequences, all at the same position; the last row of each is wanted."""
    n, length = len(tokens), len(tokens[0])
    return StepBatch(
        tokens=ints([token for piece in tokens for token in piece]),
        positions=ints([position + i for _ in tokens for i in range(length)]),
        starts=ints([length * i for i in range(n + 1)]),
        context=ints([position + length] * n),
        block_tables=ints(tables),
        rows=ints([length * (i + 1) - 1 for i in range(n)]),
        slots=ints(range(n)),
        targets=ints([-1] * n),
        top=ints([-1] * n),
    )


def lower(checkpoint: Checkpoint, kind: str, blocks: int, sequences: int) -> Executable:
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
    executable = CpuBackend().lower(graph, checkpoint, BackendOptions(0, "", CHUNK, CHUNK, kind))
    executable.allocate_kv(blocks)
    for slot in range(sequences):
        executable.open_slot(slot, SamplingParams(temperature=0, seed=0), (), (), (), 0)
    return executable


def logits_of(executable: Executable, tokens: list[int]) -> np.ndarray:
    tables = np.arange(-(-len(tokens) // BLOCK_SIZE))[None]
    out = []
    for begin in range(0, len(tokens), CHUNK):
        part = tokens[begin : begin + CHUNK]
        step = batch([part], begin, tables)
        every = StepBatch(
            **{
                name: getattr(step, name)
                for name in ("tokens", "positions", "starts", "context", "block_tables")
            },
            rows=ints(range(len(part))),
            slots=ints([0] * len(part)),
            targets=ints([0] * len(part)),
            top=ints([-1] * len(part)),
        )
        out.append(executable.logits(every))
    return np.concatenate(out)


def decode_seconds(executable: Executable, sequences: int, context: int) -> float:
    """Seconds of one decode step; the cache holds whatever it holds, whose reading costs the same."""
    per = -(-(context + STEPS) // BLOCK_SIZE)
    tables = np.arange(per * sequences).reshape(sequences, per)
    began = time.perf_counter()
    for step in range(STEPS):
        executable.step(batch([[7]] * sequences, context + step, tables))
    return (time.perf_counter() - began) / STEPS


def prefill_seconds(executable: Executable, length: int) -> float:
    tables = np.arange(-(-length // BLOCK_SIZE))[None]
    began = time.perf_counter()
    for begin in range(0, length, CHUNK):
        executable.step(batch([list(range(100, 100 + CHUNK))], begin, tables))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["SmolLM2-135M-Instruct.Q4_1.gguf"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--positions", type=int, default=500)
    options = parser.parse_args()
    for name in options.model:
        path = Path(name) if Path(name).exists() else ROOT / ".cache" / "models" / name
        checkpoint = load_checkpoint(path)
        tokens = load_tokenizer(checkpoint).encode(sample_text(), add_special=True)[: options.positions]
        reference = reference_logits(path, tokens)
        print(f"{path.name}: {len(tokens)} positions against the float reference")
        contexts = [c for c in (128, 2048, 8000) if c + STEPS <= checkpoint.config.context_length]
        blocks = max(
            -(-(contexts[-1] + STEPS) // BLOCK_SIZE), 16 * -(-(min(contexts[-1], 2048) + STEPS) // BLOCK_SIZE)
        )
        caches = {kind: lower(checkpoint, kind, blocks + 1, 16) for kind in KINDS}
        for kind, executable in caches.items():
            a = agreement(reference, logits_of(executable, tokens)[:, : reference.shape[1]])
            print(
                f"  {kind:<5} {executable.kv_bytes_per_block / BLOCK_SIZE / 1024:.2f} KiB a token"
                f"  top-1 {a['top1']:.4f}  mean KL {a['mean_kl']:.6f}  max KL {a['max_kl']:.5f}"
            )
        cells = [(f"decode B={n} at {c}", (n, c)) for c in contexts for n in (1, 16) if n * c <= 16 * 2048]
        for label, (n, context) in cells:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(options.rounds):
                for kind in KINDS:
                    times[kind].append(decode_seconds(caches[kind], n, context))
            _report(label, times, n)
        times = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                times[kind].append(prefill_seconds(caches[kind], 2048))
        _report("prefill 2048", times, 2048)


def _report(label: str, times: dict[str, list[float]], tokens: int) -> None:
    auto, int8 = (statistics.median(times[kind]) for kind in KINDS)
    print(
        f"  {label:<22} {tokens / auto:8.1f} {tokens / int8:8.1f} tok/s  int8/16-bit {auto / int8:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
