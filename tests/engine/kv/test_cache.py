from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from toque.engine.kv.cache import KVCache
from toque.errors import EngineError


def filled(kv: KVCache, names: list[bytes]) -> list[int]:
    blocks = kv.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        kv.publish(block, name)
    return blocks


A, B, C, D = (bytes([i]) for i in range(4))


def test_a_released_prefix_is_found_until_its_room_is_needed() -> None:
    kv = KVCache(3)
    blocks = filled(kv, [A, B])
    kv.release(blocks)
    assert kv.held == 0
    assert kv.available == 3
    assert kv.match([A, B, C]) == blocks
    other = kv.allocate(
        2
    )  # one free block, and the tail of the prefix: without its head it could not be found
    assert kv.match([A, B]) == blocks[:1]
    kv.release(other)
    kv.check([])


def test_the_least_recently_used_prefix_goes_first() -> None:
    kv = KVCache(4)
    old, new = filled(kv, [A, B]), filled(kv, [C, D])
    kv.release(old)
    kv.release(new)
    again = kv.match([A, B])
    kv.hold(again)
    kv.release(again)  # now the other one is older
    kv.allocate(2)
    assert kv.match([A, B]) == old
    assert kv.match([C, D]) == []


def test_a_held_block_is_never_evicted() -> None:
    kv = KVCache(3)
    blocks = filled(kv, [A, B])
    kv.hold(blocks)
    kv.release(blocks)
    assert kv.available == 1
    with pytest.raises(EngineError, match="2 KV blocks were asked for, 1 are available"):
        kv.allocate(2)
    assert kv.match([A, B]) == blocks
    kv.check([blocks])


def test_content_is_published_once() -> None:
    kv = KVCache(2)
    first, second = kv.allocate(2)
    kv.publish(first, A)
    kv.publish(second, A)  # computed twice at the same time: the second copy stays private
    assert kv.match([A]) == [first]
    kv.release([second])
    kv.release([first])
    assert kv.pool.free == 1
    kv.check([])


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    kv = KVCache(2, prefix_cache=False)
    kv.release(filled(kv, [A, B]))
    assert kv.match([A]) == []
    assert kv.pool.free == 2


def test_clear_forgets_what_nobody_holds_and_hides_the_rest() -> None:
    kv = KVCache(3)
    kv.release(filled(kv, [A]))
    held = filled(kv, [B])
    kv.clear()
    assert kv.match([A]) == kv.match([B]) == []
    kv.check([held])
    kv.release(held)
    assert kv.pool.free == 3


def test_the_check_notices_blocks_that_nobody_gave_back() -> None:
    kv = KVCache(2)
    kv.allocate(1)
    with pytest.raises(EngineError, match="has 1 references, sequences hold 0"):
        kv.check([])


def test_random_use_agrees_with_a_plain_model() -> None:
    """Seven blocks against dictionaries: which prefixes are known, and how many blocks can be had."""
    rng = random.Random(3)
    kv = KVCache(7)
    held: list[tuple[list[int], list[bytes]]] = []
    known: OrderedDict[bytes, None] = OrderedDict()  # idle names, least recently used first
    for _ in range(3000):
        if held and rng.random() < 0.5:
            blocks, names = held.pop(rng.randrange(len(held)))
            kv.release(blocks)
            busy = {name for _, others in held for name in others}
            for name in reversed(names):
                if name not in busy:
                    known[name] = None
        else:
            names = [bytes([rng.randrange(2), i]) for i in range(rng.randint(1, 3))]
            names = [b"".join(names[: i + 1]) for i in range(len(names))]
            busy = {name for _, others in held for name in others}
            hits = 0
            while hits < len(names) and (names[hits] in known or names[hits] in busy):
                hits += 1
            matched = kv.match(names)
            assert len(matched) == hits
            free = 7 - len({b for blocks, _ in held for b in blocks})
            assert kv.available == free
            need = len(names) - hits
            if need > free - kv.idle_among(matched):
                continue
            kv.hold(matched)
            for name in names[:hits]:
                known.pop(name, None)
            fresh = kv.allocate(need)
            while len(known) > kv.pool.idle:  # the oldest made room
                known.popitem(last=False)
            for block, name in zip(fresh, names[hits:], strict=True):
                # A name may survive behind an evicted head: then the new block stays private.
                kv.publish(block, name)
            private = [n for n, b in zip(names[hits:], fresh, strict=True) if kv._blocks.get(n) != b]
            held.append((matched + fresh, [n for n in names if n not in private]))
        kv.check(blocks for blocks, _ in held)
