"""Device time: what requests are given adds up to what steps took, exactly, whatever becomes of the requests."""

from __future__ import annotations

import random
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.engines import make_engine, request
from toque.engine.device_time import attribute
from toque.types import FinishReason, SamplingParams


@given(
    st.integers(0, 10**8), st.lists(st.integers(0, 6), max_size=70), st.lists(st.integers(1, 600), max_size=8)
)
def test_the_parts_of_a_step_are_by_tokens_and_make_up_the_step(
    step_us: int, drafted: list[int], counts: list[int]
) -> None:
    decodes: Any = [SimpleNamespace(device_us=0, draft=[7] * n) for n in drafted]
    chunks: Any = [(SimpleNamespace(device_us=0), count) for count in counts]
    attribute(step_us, decodes, chunks)
    parts = [(s.device_us, 1 + len(s.draft)) for s in decodes]
    parts += [(s.device_us, count) for s, count in chunks]
    total = len(drafted) + sum(drafted) + sum(counts)
    assert sum(part for part, _ in parts) == (step_us if parts else 0)
    for part, count in parts:
        assert abs(Fraction(part) - Fraction(step_us * count, total)) < 1


@pytest.mark.parametrize("seed", range(5))
def test_requests_carry_all_device_time_also_those_that_are_aborted(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(n_blocks=40)
    for number in range(12):
        prompt = [rng.randrange(3, 9) for _ in range(rng.randrange(1, 30))]
        engine.add(
            request(f"r{number}", prompt, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 9)))
        )
    carried: dict[str, int] = {}
    ended = {}
    while engine.has_work:
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randrange(12)}")
        for output in engine.step():
            carried[output.request_id] = carried.get(output.request_id, 0) + output.device_us
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
    stats = engine.stats()
    assert sum(carried.values()) == round(stats.device_seconds * 1e6)
    assert 0 < stats.device_seconds <= stats.step_seconds <= stats.up_seconds
    assert len(ended) == 12
    assert all(carried[name] > 0 for name, reason in ended.items() if reason is not FinishReason.ABORT)
