"""Toque as a benchmark worker: the same commands and answers as `llama_cpp_worker.py`, on the executable itself."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import toque
from toque.backends import load_backend
from toque.backends.base import BLOCK_SIZE, BackendOptions, StepBatch
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.types import SamplingParams

CHUNK = 512  # tokens of a prompt in one step, as the engine cuts it


def ints(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


class Peer:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        checkpoint = load_checkpoint(Path(path))
        graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
        options = BackendOptions(threads=threads, max_batch_tokens=CHUNK, max_sequences=max(sequences, CHUNK))
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

    def prompt(self, ids: list[int], table: np.ndarray) -> int:
        self.held = (0, 0, 0)
        out = 0
        for first in range(0, len(ids), CHUNK):
            chunk = ids[first : first + CHUNK]
            last = first + len(chunk) == len(ids)
            rows = ints([len(chunk) - 1] if last else [])
            result = self.executable.step(self.run([chunk], [first], table[None], rows))
            if last:
                out = int(result.tokens[0])
        return out

    def prefill(self, tokens: int) -> float:
        ids = [(i * 7919) % 40000 + 100 for i in range(tokens)]
        table = ints(range(1, -(-tokens // BLOCK_SIZE) + 1))
        start = time.perf_counter()
        self.prompt(ids, table)
        return time.perf_counter() - start

    def decode_steps(self, batch: int, context: int, steps: int) -> float:
        per = -(-(context + steps) // BLOCK_SIZE)
        tables = ints(np.arange(batch * per).reshape(batch, per) + 1)
        if self.held != (batch, context, steps):
            for s in range(batch):
                self.prompt([(i * 7919 + s) % 40000 + 100 for i in range(context)], tables[s])
            self.held = (batch, context, steps)
        rows = ints(range(batch))
        start = time.perf_counter()
        for step in range(steps):
            ids = [[(step * 31 + s) % 40000 + 100] for s in range(batch)]
            self.executable.step(self.run(ids, [context + step] * batch, tables, rows))
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


def main() -> None:
    path, threads, context, sequences = sys.argv[1], *map(int, sys.argv[2:5])
    started = time.perf_counter()
    peer = Peer(path, threads, context, sequences)
    print(json.dumps({"ready": time.perf_counter() - started, "version": toque.__version__}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "prefill":
            answer: dict[str, object] = {"seconds": peer.prefill(**command)}
        elif op == "decode":
            answer = {"seconds": peer.decode_steps(**command)}
        elif op == "logits":
            answer = {"path": peer.logits(**command)}
        elif op == "generate":
            answer = {"tokens": peer.generate(**command)}
        else:
            status = Path("/proc/self/status").read_text().splitlines()
            answer = {"rss": 1024 * next(int(x.split()[1]) for x in status if x.startswith("VmRSS"))}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
