"""Toque as a benchmark worker (see `protocol`), on the executable itself: no scheduler, no server."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from protocol import ids, serve

import toque
from toque.backends import load_backend
from toque.backends.base import BLOCK_SIZE, BackendOptions, StepBatch
from toque.engine.embedding import load_embedding_engine
from toque.engine.options import EngineOptions
from toque.formats import load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.formats.quantize import quantize_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.types import SamplingParams

CHUNK = 512  # tokens of a prompt in one step, as the engine cuts it


def ints(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


class Peer:
    def __init__(self, checkpoint: Checkpoint, threads: int, context: int, sequences: int) -> None:
        graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
        options = BackendOptions(threads=threads, max_batch_tokens=CHUNK, max_sequences=max(sequences, CHUNK))
        self.vocab = checkpoint.config.vocab_size
        self.executable = load_backend("cpu").lower(graph, checkpoint, options)
        self.held = (0, 0, 0)  # what the cache holds for decoding: sequences, tokens of each, room for steps
        self.blocks = -(-context // BLOCK_SIZE)
        self.executable.allocate_kv(self.blocks + sequences + 1)
        for slot in range(sequences):
            self.executable.open_slot(slot, SamplingParams(temperature=0, seed=0), (), (), (), 0)

    def run(
        self, tokens: list[list[int]], positions: list[int], tables: np.ndarray, rows: np.ndarray
    ) -> StepBatch:
        lengths = [len(t) for t in tokens]
        starts = ints([0, *np.cumsum(lengths)])
        flat = [p + i for p, n in zip(positions, lengths, strict=True) for i in range(n)]
        count = len(rows)
        return StepBatch(
            tokens=ints([t for ts in tokens for t in ts]),
            positions=ints(flat),
            starts=starts,
            context=ints([p + n for p, n in zip(positions, lengths, strict=True)]),
            block_tables=ints(tables),
            rows=ints(rows),
            slots=ints(range(count)) if count <= len(tokens) else ints([0] * count),
            targets=ints([-1] * count),
            top=ints([-1] * count),
        )

    def prompt(self, tokens: list[int], table: np.ndarray) -> int:
        self.held = (0, 0, 0)
        out = 0
        for first in range(0, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            last = first + len(chunk) == len(tokens)
            rows = ints([len(chunk) - 1] if last else [])
            result = self.executable.step(self.run([chunk], [first], table[None], rows))
            if last:
                out = int(result.tokens[0])
        return out

    def prefill(self, tokens: int) -> float:
        prompt = ids(tokens, self.vocab)
        table = ints(range(1, -(-tokens // BLOCK_SIZE) + 1))
        start = time.perf_counter()
        self.prompt(prompt, table)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        per = -(-(context + steps) // BLOCK_SIZE)
        tables = ints(np.arange(batch * per).reshape(batch, per) + 1)
        if self.held != (batch, context, steps):
            for s in range(batch):
                self.prompt(ids(context, self.vocab, s), tables[s])
            self.held = (batch, context, steps)
        rows = ints(range(batch))
        start = time.perf_counter()
        for step in range(steps):
            tokens = [[t] for t in ids(batch, self.vocab, step)]
            self.executable.step(self.run(tokens, [context + step] * batch, tables, rows))
        return time.perf_counter() - start

    def logits(self, tokens: list[int]) -> str:
        table = ints(range(1, -(-len(tokens) // BLOCK_SIZE) + 1))
        parts = []
        for first in range(0, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            parts.append(
                self.executable.logits(self.run([chunk], [first], table[None], np.arange(len(chunk))))
            )
        with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
            np.save(file, np.concatenate(parts))
        return file.name

    def generate(self, tokens: list[int], n: int) -> list[int]:
        table = ints(range(1, -(-(len(tokens) + n) // BLOCK_SIZE) + 1))
        out = [self.prompt(tokens, table)]
        while len(out) < n:
            position = len(tokens) + len(out) - 1
            batch = self.run([[out[-1]]], [position], table[None], ints([0]))
            out.append(int(self.executable.step(batch).tokens[0]))
        return out


class Encoder:
    """A model that makes embeddings."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        self.vocab = checkpoint.config.vocab_size
        self.engine = load_embedding_engine(checkpoint, EngineOptions(threads=threads, max_batch_tokens=2048))

    def embed(self, batch: int, context: int) -> float:
        texts = [ids(context, self.vocab, s) for s in range(batch)]
        start = time.perf_counter()
        self.engine.embed(texts)
        return time.perf_counter() - start


def make(path: str, threads: int, context: int, sequences: int) -> Peer | Encoder:
    checkpoint = load_checkpoint(Path(path))
    if scheme := os.environ.get("TOQUE_WORKER_QUANTIZE"):
        checkpoint = quantize_checkpoint(checkpoint, scheme)
    if checkpoint.config.pooling:
        return Encoder(checkpoint, threads)
    return Peer(checkpoint, threads, context, sequences)


if __name__ == "__main__":
    serve(make, toque.__version__)
