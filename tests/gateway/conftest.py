from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .world import World, world


@pytest.fixture
async def parrot() -> AsyncIterator[World]:
    """A gateway over one scripted model that says "ok"."""
    async with world() as made:
        yield made
