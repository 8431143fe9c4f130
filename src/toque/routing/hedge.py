"""Two replicas for one request until the first token: whichever speaks first goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from toque.errors import QueueFullError, ReplicaDiedError, UnavailableError
from toque.types import SequenceOutput

Outputs = AsyncGenerator[SequenceOutput, None]
PASSED_OVER = (UnavailableError, QueueFullError, ReplicaDiedError)


class Racer:
    """One replica's answer, of which the first output is awaited beside others. `close` has to be awaited."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.first = asyncio.ensure_future(anext(outputs))

    @property
    def refused(self) -> bool:
        """It ended without an output, in a way that says nothing about the other."""
        return self.first.done() and isinstance(self.first.exception(), PASSED_OVER)

    async def close(self) -> None:
        self.first.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
            await self.first
        await self.outputs.aclose()


async def speaks_within(racer: Racer, seconds: float) -> bool:
    """Whether the first output, or an error in its place, came in time."""
    done, _ = await asyncio.wait({racer.first}, timeout=seconds)
    return bool(done)


async def first_to_speak(one: Racer, other: Racer) -> Racer:
    """The one whose first output came first; one that was refused waits for the other."""
    pending = {one.first, other.first}
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for racer in (one, other):
            if racer.first.done() and not racer.refused:
                return racer
    return one
