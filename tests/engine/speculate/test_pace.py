"""How far to guess, against trying every possibility."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.engine.speculate.pace import EVIDENCE, LEAST_GAIN, Beliefs, StepCost, best_counts


@st.composite
def falling(draw: st.DrawFn) -> list[float]:
    return sorted((draw(st.floats(0.0, 1.0)) for _ in range(draw(st.integers(0, 3)))), reverse=True)


@given(
    st.lists(falling(), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 1.0), min_size=10, max_size=10),
    st.sampled_from([0.0, 0.3]),
)
def test_no_other_choice_yields_more_tokens_per_second(
    gains: list[list[float]], increments: list[float], round_seconds: float
) -> None:
    seconds = list(itertools.accumulate(increments))
    sure = len(gains)

    def rate(counts: tuple[int, ...]) -> float:
        expected = sure + sum(sum(row[:count]) for row, count in zip(gains, counts, strict=True))
        return expected / (seconds[sum(counts)] + round_seconds * max(counts))

    chosen = rate(tuple(best_counts(gains, seconds, sure, round_seconds)))
    best = max(rate(counts) for counts in itertools.product(*(range(len(row) + 1) for row in gains)))
    plain = rate((0,) * sure)
    if round_seconds == 0.0:  # less of a gain is left alone
        assert chosen >= best * (1 - 1e-9) or (chosen == plain and best <= LEAST_GAIN * plain * (1 + 1e-9))
    assert chosen >= plain * (1 - 1e-9)


def test_nothing_is_drafted_before_a_step_was_measured_or_beyond_what_fits() -> None:
    assert best_counts([[0.9, 0.8]], StepCost().seconds(1, 3), 1) == [0]
    assert best_counts([[0.9, 0.8]], [1.0, 1.0], 1) == [1]
    assert best_counts([], [1.0], 3) == []


def test_beliefs_follow_what_came_true_by_evidence() -> None:
    beliefs = Beliefs([0.5] * EVIDENCE)
    own = beliefs.new()
    for _ in range(60):
        beliefs.learn(own, 2, right=0, wrong=True)
        beliefs.learn(own, 9, right=3, wrong=False)
    assert beliefs.gains(own, 2, 1)[0] < 0.05
    assert beliefs.gains(own, 9, 3)[2] > 0.9
    newcomer = beliefs.new()
    assert 0.05 < beliefs.gains(newcomer, 2, 1)[0] < 0.3
    assert beliefs.gains(newcomer, 9, 3) == sorted(beliefs.gains(newcomer, 9, 3), reverse=True)
    assert len(beliefs.gains(own, 40, 5)) == 5


def true_seconds(rows: int) -> float:
    """A device whose step costs the same up to four rows."""
    return 0.004 * max(1.0, rows / 4)


def test_the_shape_is_learnt_through_noise_and_a_drifting_machine() -> None:
    rng = random.Random(3)
    cost = StepCost()
    for step in range(600):
        drift = 1.0 + 0.5 * math.sin(step / 60)
        rows = rng.choice([1, 1, 1, 4, 8, 9])
        cost.observe(
            rows, true_seconds(rows) * drift * rng.uniform(0.9, 1.2) * (4.0 if rng.random() < 0.03 else 1.0)
        )
    curve = cost.seconds(1, 9)
    for rows in (1, 4, 8, 9):
        assert curve[rows - 1] / curve[0] == pytest.approx(true_seconds(rows) / true_seconds(1), rel=0.25)
    assert curve[0] < curve[5] < curve[8]


def test_a_size_that_looked_dear_is_tried_again() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 0.004)
    for _ in range(5):
        cost.observe(5, 0.1)  # somebody else had the machine
    assert best_counts([[0.5] * 4], cost.seconds(1, 5), 1) == [0]
    tried = 0
    for _ in range(3000):
        drafted = best_counts([[0.9, 0.8, 0.7, 0.6]], cost.seconds(1, 5), 1)[0]
        tried += drafted > 0
        cost.observe(1 + drafted, true_seconds(1 + drafted))
    assert tried > 1000


def test_guesses_stop_where_rows_cost_more_than_they_bring() -> None:
    cost = StepCost()
    for step in range(400):
        rows = 64 if step % 3 else 72
        cost.observe(rows, 0.001 * rows)  # a large batch: every row costs the same
    assert sum(best_counts([[0.6, 0.36]] * 64, cost.seconds(64, 33), 64)) == 0
