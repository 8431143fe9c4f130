"""What a benchmark sends: seeded, so that two runs and two servers get the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = (
    "river stone market window engine garden winter letter bridge silver morning teacher village station music "
    "harbour forest paper mountain doctor summer kitchen castle journey theory number language science history "
    "animal planet weather friend country question answer system process memory signal pattern story picture"
).split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in sending order, and how many are kept in flight at once."""

    name: str
    prompts: tuple[str, ...]
    output_tokens: int
    concurrency: int


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def _chat(rng: random.Random, words: int) -> str:
    return f"Write a long story that uses these words: {_text(rng, words)}."


def sequential(*, requests: int = 20, words: int = 58, output_tokens: int = 64, seed: int = 1) -> Workload:
    """One chat after another: about 99 prompt tokens with SmolLM2's template and tokenizer."""
    rng = random.Random(seed)
    prompts = tuple(_chat(rng, words) for _ in range(requests))
    return Workload("sequential", prompts, output_tokens, 1)


def concurrent(
    *, requests: int = 100, concurrency: int = 100, words: int = 58, output_tokens: int = 64, seed: int = 2
) -> Workload:
    """Many chats at once."""
    rng = random.Random(seed)
    prompts = tuple(_chat(rng, words) for _ in range(requests))
    return Workload("concurrent", prompts, output_tokens, concurrency)


def shared_prefix(
    *,
    requests: int = 50,
    concurrency: int = 8,
    prefix_words: int = 950,
    words: int = 20,
    output_tokens: int = 64,
    seed: int = 3,
) -> Workload:
    """Requests that share a long beginning (about 1,000 tokens), as a system prompt or a document would."""
    rng = random.Random(seed)
    prefix = _text(rng, prefix_words)
    prompts = tuple(f"{prefix}\n\nQuestion {i}: {_chat(rng, words)}" for i in range(requests))
    return Workload("shared-prefix", prompts, output_tokens, concurrency)


WORKLOADS = {"sequential": sequential, "concurrent": concurrent, "shared-prefix": shared_prefix}
