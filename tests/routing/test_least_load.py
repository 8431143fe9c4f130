"""The least loaded replica, and nothing but the loads decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.routing.policies.least_load import Load, least_load

loads = st.lists(
    st.builds(Load, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0.0, 0.5])),
    min_size=1,
)


@given(loads)
def test_nobody_has_less(found: list[Load]) -> None:
    def weight(load: Load) -> tuple[int, int, float]:
        return max(load.in_flight, load.requests), load.queued_tokens, load.kv_usage

    chosen = least_load(found)
    assert all(weight(found[chosen]) <= weight(load) for load in found)


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
    assert least_load(found) == expected
