"""What the engine's Python costs per step: scheduling, batch building, bookkeeping, on an instant executable.

    python benchmarks/scheduler.py [--sequences 64] [--steps 2000]

Prints microseconds per step (median and best of rounds) while all sequences decode. The aim is under 200 at 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from toque.backends.base import Float32, StepBatch, StepResult
from toque.engine.engine import Engine
from toque.engine.options import EngineOptions
from toque.types import EngineRequest, SamplingParams


class InstantExecutable:
    """Answers every row with the same token, at once."""

    vocab_size = 32_000
    kv_bytes_per_block = 1

    def __init__(self) -> None:
        self._answer = np.full(1024, 7, np.int32)

    def allocate_kv(self, n_blocks: int) -> None: ...

    def open_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None: ...

    def close_slot(self, slot: int) -> None: ...

    def step(self, batch: StepBatch) -> StepResult:
        return StepResult(self._answer[: len(batch.rows)])

    def logits(self, batch: StepBatch) -> Float32:
        raise NotImplementedError

    def close(self) -> None: ...


def measure(
    sequences: int, steps: int, prompt: int = 200, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    blocks = sequences * 300
    engine = Engine(
        InstantExecutable(),
        EngineOptions(max_sequences=sequences),
        context_length=8192,
        n_blocks=blocks,
        valid_vocab=32_000,
    )
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(2,))
    for i in range(sequences):
        # Lengths differ, so that block boundaries are spread over the steps as in real use.
        tokens = tuple(np.random.default_rng(i).integers(3, 32_000, prompt + i).tolist())
        engine.add(EngineRequest(f"chatcmpl-{i:032d}", tokens, sampling))
    while engine.scheduler.waiting or any(not s.decoding for s in engine.scheduler.running):
        engine.step()
    rounds = []
    for _ in range(steps // 100):
        started = clock()
        for _ in range(100):
            engine.step()
        rounds.append((clock() - started) * 1e4)
    engine.check()
    return {"sequences": sequences, "median_us": statistics.median(rounds), "best_us": min(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    for sequences in arguments.sequences:
        result = measure(sequences, arguments.steps)
        print(json.dumps({key: round(value, 1) for key, value in result.items()}))


if __name__ == "__main__":
    main()
