"""The least loaded replica, and nothing but the loads decides."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.routing.policies.base import Key, Load
from toque.routing.policies.least_load import LeastLoad
from toque.types import EngineRequest, EngineStats, SamplingParams

REQUEST = EngineRequest("r", (1,), SamplingParams())
loads = st.lists(
    st.builds(Load, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0.0, 0.5])),
    min_size=1,
)


@dataclass
class Replica:
    key: Key
    load: Load


def chosen(found: list[Load]) -> int:
    return LeastLoad().choose(REQUEST, [Replica((str(i), 1), load) for i, load in enumerate(found)])


@given(loads)
def test_nobody_has_less(found: list[Load]) -> None:
    def weight(load: Load) -> tuple[int, int, float]:
        return max(load.in_flight, load.requests), load.queued_tokens, load.kv_usage

    assert all(weight(found[chosen(found)]) <= weight(load) for load in found)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([Load(2), Load(1)], 1),
        ([Load(0, requests=5), Load(3)], 1),  # others keep the first one busy
        ([Load(1, queued_tokens=9), Load(1)], 1),
        ([Load(1, kv_usage=0.9), Load(1, kv_usage=0.1)], 1),
        ([Load(1), Load(1)], 0),
    ],
)
def test_what_counts_first(found: list[Load], expected: int) -> None:
    assert chosen(found) == expected


@given(st.lists(st.sampled_from(["sent", "ended", "busy", "idle"])))
def test_a_load_that_is_kept_equals_one_that_is_made_anew(steps: list[str]) -> None:
    load = Load()
    for step in steps:
        if step == "sent":
            load.sent()
        elif step == "ended":
            load.ended()
        else:
            busy = 2 * (step == "busy")
            load.report(
                EngineStats(
                    running=busy,
                    waiting=1,
                    queued_tokens=busy,
                    kv_blocks_used=busy,
                    kv_blocks_total=4 * (busy > 0),
                )
            )
        assert load.weight == Load(load.in_flight, load.requests, load.queued_tokens, load.kv_usage).weight
