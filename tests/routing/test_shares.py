"""Requests over versions: by their shares, and the same request always the same way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from toque.routing.shares import choose_version, point_of


def test_shares_are_kept_over_many_requests() -> None:
    shares = {"v1": 0.9, "v2": 0.1}
    counts = Counter(choose_version(shares, point_of(f"request-{i}")) for i in range(5000))
    assert abs(counts["v2"] / 5000 - 0.1) < 0.015


def test_the_same_request_goes_the_same_way_in_every_gateway() -> None:
    first = [choose_version({"a": 0.5, "b": 0.5}, point_of(str(i))) for i in range(50)]
    assert first == [choose_version({"b": 0.5, "a": 0.5}, point_of(str(i))) for i in range(50)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 0.05, 0.25, 1.0])),
    st.floats(0, 1, exclude_max=True),
    st.frozensets(st.sampled_from("abcd")),
)
def test_only_who_has_a_share_and_is_able(
    shares: dict[str, float], point: float, able: frozenset[str]
) -> None:
    chosen = choose_version(shares, point, able.__contains__)
    candidates = {version for version in able if shares.get(version)}
    assert chosen in candidates if candidates else chosen is None


def test_growing_a_share_moves_requests_in_one_direction_only() -> None:
    points = [point_of(str(i)) for i in range(500)]
    moved = Counter(
        (choose_version({"old": 0.9, "new": 0.1}, p), choose_version({"old": 0.5, "new": 0.5}, p))
        for p in points
    )
    assert ("new", "old") not in moved
