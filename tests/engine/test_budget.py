"""The budget against machines whose costs are known: a step of streams settles at the target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toque.engine.budget import StepBudget

TARGET = 0.050


def settle(
    budget: StepBudget, decoding: int, seconds: Callable[[int, int], float], steps: int = 60
) -> list[float]:
    """Run steps with more prompt waiting than fits; the seconds that each takes."""
    taken = []
    for _ in range(steps):
        prefill = budget.prefill_tokens(decoding)
        assert 1 <= prefill <= budget.max_tokens - decoding
        taken.append(seconds(decoding, prefill))
        budget.observe(decoding, prefill, taken[-1])
    return taken


@pytest.mark.parametrize("decoding", [1, 16, 64])
@pytest.mark.parametrize("per_token", [20e-6, 500e-6])
def test_steps_settle_at_the_target_while_streams_decode(decoding: int, per_token: float) -> None:
    budget = StepBudget(TARGET, 2048)
    budget.observe(0, 512, 0.005 + 512 * per_token)  # the first prompt, before any stream
    for _ in range(10):
        budget.observe(decoding, 0, 0.005 + 0.0002 * decoding)
    taken = settle(budget, decoding, lambda d, p: 0.005 + 0.0002 * d + per_token * p)
    assert max(taken) < 1.2 * TARGET
    full = 0.005 + 0.0002 * decoding + per_token * (2048 - decoding)  # a fast machine need not fill the time
    assert min(taken[-20:]) > 0.8 * min(TARGET, full)


def test_a_growing_context_shrinks_the_chunks() -> None:
    budget = StepBudget(TARGET, 2048)
    slow = iter(range(10_000))
    taken = settle(budget, 4, lambda d, p: 0.004 + p * (100e-6 + 2e-6 * next(slow)), steps=200)
    assert max(taken[5:]) < 1.3 * TARGET


def test_the_last_tokens_of_cached_prompts_do_not_make_prefill_look_slow() -> None:
    def cost(decoding: int, prefill: int) -> float:
        return 0.006 + 0.0002 * decoding + 0.0004 * prefill

    budget = StepBudget(TARGET, 2048)
    budget.observe(0, 400, cost(0, 400))
    for turn in range(300):
        budget.observe(8, turn % 2, cost(8, turn % 2))  # every other step admits somebody who is almost done
    assert cost(8, budget.prefill_tokens(8)) > 0.7 * TARGET


def test_one_hiccup_does_not_collapse_the_budget() -> None:
    budget = StepBudget(TARGET, 2048)
    settle(budget, 4, lambda d, p: 0.004 + p * 100e-6)
    before = budget.prefill_tokens(4)
    budget.observe(4, before, 10.0)
    assert budget.prefill_tokens(4) > before / 3
    settle(budget, 4, lambda d, p: 0.004 + p * 100e-6, steps=20)
    assert budget.prefill_tokens(4) == pytest.approx(before, rel=0.05)


def test_prefill_advances_even_where_decoding_alone_misses_the_target() -> None:
    budget = StepBudget(TARGET, 2048)
    for _ in range(20):
        budget.observe(8, 0, 0.200)
    taken = settle(budget, 8, lambda d, p: 0.200 + p * 1e-3)
    assert budget.prefill_tokens(8) >= 16
    assert max(taken[5:]) < 0.200 * 1.4


def test_without_streams_a_step_is_as_large_as_waiting_allows() -> None:
    budget = StepBudget(TARGET, 2048)
    assert budget.prefill_tokens(0) == 2048
    budget.observe(0, 2048, 0.2)
    assert budget.prefill_tokens(0) == 2048
    slow = StepBudget(TARGET, 2048)
    slow.observe(0, 2048, 20.0)  # ten seconds a thousand tokens: nobody could abort or arrive meanwhile
    assert slow.prefill_tokens(0) == pytest.approx(51, abs=2)


def test_the_budget_never_exceeds_the_batch() -> None:
    budget = StepBudget(TARGET, 32)
    budget.observe(0, 32, 1e-9)
    assert budget.prefill_tokens(30) == 2
    assert budget.prefill_tokens(32) == 0
