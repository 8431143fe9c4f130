"""A request's moments: bounded, and whole after a way through a file."""

from __future__ import annotations

import pytest

from toque.monitor.ledger.segment import MAX_PAYLOAD
from toque.monitor.trail import MAX_EVENTS, Moment, Trail, TrailKind, decode, encode
from toque.types import StepEvent, StepEventKind


def test_a_trail_comes_back_as_it_was() -> None:
    trail = Trail("chatcmpl-1", 5, "mine", "acme", "/v1/completions", "m", "ab", "cd", "ef")
    trail.note(1, TrailKind.ADMITTED)
    trail.note(7, TrailKind.ROUTED, choice=2, tokens=3, note="a.1")
    trail.stepped(7, 2, [StepEvent(StepEventKind.PREFILL, 4, 100, 9)])
    assert decode(encode(trail)) == trail
    assert trail.moments[-1] == Moment(11, "prefill", 2, 100, 9)


def test_moments_are_ordered_by_time_however_they_came() -> None:
    trail = Trail("r", 0)
    trail.note(50, TrailKind.FIRST_TOKEN)
    trail.stepped(10, 0, [StepEvent(StepEventKind.SCHEDULED, 5, 0, 1)])
    assert [moment.at_us for moment in trail.ordered()] == [15, 50]


def test_a_trail_is_bounded_and_still_tells_the_end() -> None:
    trail = Trail("r" * 160, 0)
    for number in range(2 * MAX_EVENTS):
        trail.note(2**40 + number, TrailKind.ROUTED, 2**30, 2**30, 2**30, note="x" * 1_000)
    trail.stepped(0, 0, [StepEvent(StepEventKind.PREFILL, 1, 1, 1)] * 10)
    trail.note(1, TrailKind.CLOSED, note="ok 200")
    assert len(trail.moments) == MAX_EVENTS + 1
    assert trail.moments[-1].kind == "closed"
    assert trail.dropped == MAX_EVENTS + 10
    assert len(encode(trail)) < MAX_PAYLOAD


@pytest.mark.parametrize("payload", [b"", b"\x02abc", b"\x01", b"\x01\x93"])
def test_what_is_no_trail_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="trail"):
        decode(payload)
