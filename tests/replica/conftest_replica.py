"""What several tests of replicas write again and again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterable

from toque.routing.base import EngineClient
from toque.types import EngineRequest, SamplingParams, SequenceOutput

Start = Callable[..., "subprocess.Popen[bytes]"]


def request(*prompt: int, **sampling: object) -> EngineRequest:
    return EngineRequest(f"r{prompt[0]}", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]


async def collect(client: EngineClient, asked: EngineRequest) -> list[SequenceOutput]:
    return [output async for output in client.generate(asked)]


def flat(outputs: Iterable[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def until(condition: Callable[[], object], within_s: float) -> None:
    """Returns once it holds; fails when that takes longer. The last look is at the very end."""
    for _ in range(int(within_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"not within {within_s} s"
