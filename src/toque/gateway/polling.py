"""Waiting for what announces nothing: it is looked at every 20 ms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

POLL_S = 0.02


async def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition()`` came true within so many seconds."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + seconds
    while not condition():
        if loop.time() >= give_up:
            return False
        await asyncio.sleep(POLL_S)
    return True
