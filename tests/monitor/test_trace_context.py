"""W3C traceparent: joined where it is well-formed, begun anew where it is not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.monitor.trace_context import trace_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_callers_trace_is_joined_with_its_decision() -> None:
    trace = trace_of(f"00-{TRACE}-{PARENT}-01", "vendor=1", 0.0)
    assert (trace.trace_id, trace.parent_id, trace.sampled, trace.state) == (TRACE, PARENT, True, "vendor=1")
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", trace.traceparent)
    assert trace.span_id != PARENT
    assert not trace_of(f"00-{TRACE}-{PARENT}-00", None, 1.0).sampled


def test_a_later_version_may_say_more() -> None:
    assert trace_of(f"01-{TRACE}-{PARENT}-01-more", None, 0).trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE[:-1]}-{PARENT}-01",
    ],
)
def test_what_does_not_parse_begins_a_new_trace(header: str) -> None:
    trace = trace_of(header, "vendor=1", 1.0)
    assert trace.trace_id != TRACE
    assert (trace.parent_id, trace.state, trace.sampled) == ("", "", True)


@given(st.text(max_size=80))
def test_any_text_is_survived(header: str) -> None:
    trace = trace_of(header, header, 0.5)
    assert trace_of(trace.traceparent, None, 0).trace_id == trace.trace_id


def test_the_ratio_is_kept() -> None:
    assert not any(trace_of(None, None, 0.0).sampled for _ in range(200))
    assert all(trace_of(None, None, 1.0).sampled for _ in range(200))
    assert 300 < sum(trace_of(None, None, 0.25).sampled for _ in range(2_000)) < 700
