from __future__ import annotations

import pytest

from toque.engine.rate import TokenRate


def test_a_steady_stream_is_measured() -> None:
    rate = TokenRate()
    for step in range(1000):
        rate.add(5, step * 0.02)
    assert rate.per_second(20.0) == pytest.approx(250, rel=0.1)


def test_an_idle_engine_generates_nothing() -> None:
    rate = TokenRate()
    assert rate.per_second(3.0) == 0.0
    rate.add(100, 3.0)
    assert rate.per_second(3.1) > 0.0
    assert rate.per_second(60.0) == 0.0


def test_memory_is_bounded() -> None:
    rate = TokenRate()
    for step in range(100_000):
        rate.add(1, step * 0.3)
    assert len(rate._slices) < 30
