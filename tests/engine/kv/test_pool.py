from __future__ import annotations

import pytest

from toque.engine.kv.pool import BlockPool
from toque.errors import EngineError


def test_every_block_is_free_held_or_idle() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.hold(first)
    assert (pool.free, pool.held, pool.idle) == (1, 2, 0)
    assert not pool.drop(first, keep=True)  # somebody else still holds it
    assert pool.drop(first, keep=True)
    assert pool.drop(second, keep=False)
    assert (pool.free, pool.held, pool.idle) == (2, 0, 1)
    pool.discard(first)
    assert pool.free == 3
    pool.check()


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block, keep=False)
    with pytest.raises(EngineError, match="released more often"):
        pool.drop(block, keep=False)
    pool.check()


def test_a_free_block_cannot_be_shared_or_discarded() -> None:
    pool = BlockPool(1)
    with pytest.raises(EngineError, match="is free"):
        pool.hold(0)
    with pytest.raises(EngineError, match="not idle"):
        pool.discard(0)


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(EngineError, match="no free block"):
        pool.take()
    with pytest.raises(EngineError, match="at least one block, got 0"):
        BlockPool(0)


def test_lost_and_doubled_blocks_are_noticed() -> None:
    lost = BlockPool(3)
    lost._free.pop()
    with pytest.raises(EngineError, match="lost"):
        lost.check()
    doubled = BlockPool(3)
    doubled._free.append(0)
    with pytest.raises(EngineError, match="twice"):
        doubled.check()
