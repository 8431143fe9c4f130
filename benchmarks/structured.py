"""What a grammar costs a decode: rounds of requests with and without one, interleaved, on one engine.

``python benchmarks/structured.py [MODEL.gguf] [--batch 16] [--rounds 3]`` prints how much longer a step takes with
grammars (each round of them between two without), and the time inside grammars (masks and advancing). Times are CPU
times on one thread, and the quickest tenth of the steps, so that other processes disturb them little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.formats import load_checkpoint
from toque.text.grammar.compiler import Matcher
from toque.text.grammar.spec import GrammarSpec
from toque.text.tokenizer import load_tokenizer
from toque.types import EngineRequest, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 30},
    },
    "required": ["name", "age", "tags"],
}
PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 64


class Timed(Matcher):
    """Adds up the time spent in matchers."""

    seconds = 0.0
    masks = 0

    @classmethod
    def install(cls) -> None:
        fill, accept = Matcher.fill, Matcher.accept

        def timed(call: Any, *args: Any) -> Any:
            began = time.process_time()
            result = call(*args)
            cls.seconds += time.process_time() - began
            return result

        def timed_fill(self: Matcher, row: Any) -> None:
            cls.masks += 1
            timed(fill, self, row)

        Matcher.fill = timed_fill  # type: ignore[method-assign]
        Matcher.accept = lambda self, token: timed(accept, self, token)  # type: ignore[method-assign]


def one_round(engine: Engine, prompt: list[int], batch: int, grammar: str | None, name: str) -> list[float]:
    for i in range(batch):
        sampling = SamplingParams(temperature=0.8, seed=i, max_tokens=TOKENS)
        engine.add(
            EngineRequest(f"{name}-{i}", (*prompt, 100 + i), sampling, grammar=grammar, cache_salt=name)
        )
    steps = []
    while engine.has_work:
        began = time.process_time()
        outputs = engine.step()
        if len(outputs) >= batch - 1:
            steps.append(time.process_time() - began)
    return steps


def quick(steps: list[float]) -> float:
    """The tenth percentile: what a step takes while nobody else has the core."""
    return sorted(steps)[len(steps) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    checkpoint = load_checkpoint(args.model)
    prompt = load_tokenizer(checkpoint).encode(PROMPT, add_special=False)
    engine = load_engine(checkpoint, EngineOptions(kv_blocks=512, threads=1))
    grammar = GrammarSpec.json_schema(SCHEMA).encode()
    Timed.install()
    one_round(engine, prompt, args.batch, grammar, "warm")
    Timed.seconds, Timed.masks = 0.0, 0
    plain: list[float] = []
    ratios: list[float] = []
    for i in range(args.rounds):
        before = one_round(engine, prompt, args.batch, None, f"plain{i}")
        formed = one_round(engine, prompt, args.batch, grammar, f"formed{i}")
        after = one_round(engine, prompt, args.batch, None, f"again{i}")
        plain += before + after
        ratios.append(2 * quick(formed) / (quick(before) + quick(after)))
    engine.close()
    per_token = Timed.seconds / max(Timed.masks, 1)
    step = quick(plain)
    print(
        f"batch {args.batch}: plain step {1e3 * step:.2f} ms; with grammars {statistics.median(ratios):.3f} times that,"
        f" by round {' '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )
    print(
        f"in grammars {1e6 * per_token:.0f} us a token, {100 * per_token * args.batch / step:.1f}% of a plain step"
    )


if __name__ == "__main__":
    main()
