"""One after the other, also while replicas come and go."""

from __future__ import annotations

from dataclasses import dataclass, field

from toque.routing.policies.base import Key, Load
from toque.routing.policies.round_robin import RoundRobin
from toque.types import EngineRequest, SamplingParams


@dataclass
class Replica:
    key: Key
    load: Load = field(default_factory=Load)


def turns(policy: RoundRobin, names: str, count: int) -> str:
    replicas = [Replica((name, 1)) for name in names]
    request = EngineRequest("r", (1,), SamplingParams())
    return "".join(replicas[policy.choose(request, replicas)].key[0] for _ in range(count))


def test_everybody_in_turn_whatever_the_order_of_the_table() -> None:
    assert turns(RoundRobin(), "bac", 7) == "abcabca"


def test_goes_on_where_it_was_when_replicas_come_and_go() -> None:
    policy = RoundRobin()
    assert turns(policy, "abc", 2) == "ab"
    assert turns(policy, "abcd", 1) == "c"
    assert turns(policy, "ab", 2) == "ab"  # d never came
    assert turns(policy, "a", 3) == "aaa"
