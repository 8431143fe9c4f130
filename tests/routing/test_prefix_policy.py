"""Prompts go where their beginning is cached, unless that replica has too much to do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from toque.routing.policies.base import Key, Load
from toque.routing.policies.prefix import BLOCK, PrefixAffinity, chain_of
from toque.types import EngineRequest, SamplingParams


@dataclass
class Replica:
    key: Key
    load: Load = field(default_factory=Load)


def request(*blocks: int, **fields: str) -> EngineRequest:
    prompt = tuple(token for block in blocks for token in [block] * BLOCK)
    return EngineRequest("r", prompt, SamplingParams(), **fields)  # type: ignore[arg-type]


def replicas(count: int) -> list[Replica]:
    return [Replica((f"r{i}", 1)) for i in range(count)]


def test_the_same_beginning_goes_to_the_same_replica() -> None:
    policy, those = PrefixAffinity(), replicas(4)
    first = policy.choose(request(1, 2, 3), those)
    those[first].load.sent()  # so that least load would choose another
    assert policy.choose(request(1, 2, 9), those) == first
    assert policy.choose(request(7, 2, 3), those) != first


def test_the_longest_beginning_counts() -> None:
    policy, those = PrefixAffinity(), replicas(3)
    a = policy.choose(request(1, 2), those)
    those[a].load.sent()
    b = policy.choose(request(5), those)
    those[b].load.sent()
    # Overloaded for once: the long prompt is cached at another replica too.
    for _ in range(9):
        those[a].load.sent()
    c = policy.choose(request(1, 2, 3), those)
    assert c not in (a, b)
    for _ in range(9):
        those[a].load.ended()
    assert policy.choose(request(1, 2, 3, 4), those) == c
    assert policy.choose(request(1, 2, 8), those) in (a, c)


def test_an_overloaded_replica_is_passed_over_for_the_least_loaded() -> None:
    policy, those = PrefixAffinity(slack=2), replicas(2)
    first = policy.choose(request(1), those)
    for _ in range(2):
        those[first].load.sent()
        assert policy.choose(request(1), those) == first
    those[first].load.sent()
    assert policy.choose(request(1), those) != first


def test_less_than_a_block_is_no_prefix() -> None:
    policy, those = PrefixAffinity(), replicas(2)
    short = EngineRequest("r", (1,) * (BLOCK - 1), SamplingParams())
    assert not chain_of(short)
    first = policy.choose(short, those)
    those[first].load.sent()
    assert policy.choose(short, those) != first


def test_tenants_and_salts_share_nothing() -> None:
    policy, those = PrefixAffinity(), replicas(2)
    first = policy.choose(request(1, tenant="a"), those)
    those[first].load.sent()
    assert policy.choose(request(1, tenant="b"), those) != first
    assert policy.choose(request(1, tenant="a", cache_salt="s"), those) != first


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    policy, those = PrefixAffinity(max_hashes=3), replicas(2)
    first = policy.choose(request(1), those)
    those[first].load.sent()
    for block in (2, 3):
        policy.choose(request(block), [those[1 - first]])
    assert policy.choose(request(1), those) == first
    policy.choose(request(4), [those[1 - first]])  # now 2 is the oldest, and out
    assert policy.choose(request(1), those) == first
    those[1 - first].load.sent()
    those[1 - first].load.sent()
    assert policy.choose(request(2), those) == first


def test_a_thousand_restarts_leave_no_trace_and_change_no_decision() -> None:
    """Against a policy that remembers everything by name."""
    policy = PrefixAffinity()
    random_ = random.Random(3)
    known: dict[tuple[int, ...], set[Key]] = {}
    those = replicas(3)
    for epoch in range(2, 1200):
        blocks = tuple(random_.randrange(3) for _ in range(random_.randrange(1, 4)))
        index = policy.choose(request(*blocks), those)
        expected: set[Key] = set()
        for end in range(1, len(blocks) + 1):
            holders = known.get(blocks[:end], set()) & {r.key for r in those}
            expected = holders or expected
        assert not expected or those[index].key in expected
        for end in range(1, len(blocks) + 1):
            known.setdefault(blocks[:end], set()).add(those[index].key)
        dying = random_.randrange(3)
        policy.forget(those[dying].key)
        those[dying] = Replica((f"r{dying}", epoch))
    assert policy._next < 1100
