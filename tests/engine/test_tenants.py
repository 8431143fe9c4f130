"""A tenant that floods the engine does not delay another, whose answers stay what they are alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.options import EngineOptions
from toque.errors import ConfigError
from toque.types import EngineRequest, SamplingParams


def engine(slots: int = 8, blocks: int = 512, weights: Mapping[str, float] | None = None) -> Engine:
    executable = FakeExecutable()
    executable.allocate_kv(blocks)
    listed = ",".join(f"{name}={weight}" for name, weight in (weights or {}).items())
    options = EngineOptions(max_sequences=slots, max_batch_tokens=256, tenant_weights=listed)
    return Engine(executable, options, context_length=512, n_blocks=blocks)


def request(
    tenant: str, number: int, tokens: int = 100, prompt: int = 40, priority: int = 0
) -> EngineRequest:
    ids = tuple((number * 7 + i) % 60 for i in range(prompt))
    sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
    return EngineRequest(f"{tenant}{number}", ids, sampling, tenant=tenant, priority=priority)


def steps_to_first_token(made: Engine, name: str, most: int = 400) -> int:
    for step in range(1, most):
        if any(output.request_id == name and output.tokens for output in made.step()):
            return step
    raise AssertionError(f"{name} got no token within {most} steps")


def running(made: Engine) -> Counter[str]:
    return Counter(sequence.tenant.name for sequence in made.scheduler.running)


@pytest.mark.parametrize("blocks", [512, 24])  # 24: the cache is full before the places are
@pytest.mark.parametrize("flood", [8, 200])
def test_the_first_token_comes_as_soon_as_on_a_quiet_engine(flood: int, blocks: int) -> None:
    quiet = engine(blocks=blocks)
    quiet.add(request("b", 1))
    alone = steps_to_first_token(quiet, "b1")
    busy = engine(blocks=blocks)
    for number in range(flood):
        busy.add(request("a", number))
    for _ in range(30):
        busy.step()
    for number in range(1, 4):
        busy.add(request("b", number))
        assert steps_to_first_token(busy, f"b{number}") <= alone + 1
    busy.scheduler.check()


def test_places_settle_at_equal_shares_without_going_back_and_forth() -> None:
    made = engine()
    for number in range(50):
        made.add(request("a", number))
    for _ in range(10):
        made.step()
    for number in range(50):
        made.add(request("b", number))
    for _ in range(20):
        made.step()
    assert running(made) == {"a": 4, "b": 4}
    settled = made.stats().preemptions
    assert settled == 4
    for _ in range(30):
        made.step()
    assert made.stats().preemptions == settled


def test_weights_set_the_shares() -> None:
    made = engine(weights={"a": 3.0})
    for number in range(50):
        made.add(request("a", number))
    for _ in range(10):
        made.step()
    for number in range(50):
        made.add(request("b", number))
    for _ in range(20):
        made.step()
    assert running(made) == {"a": 6, "b": 2}


def test_an_important_answer_is_not_pushed_out_for_anothers_share() -> None:
    made = engine(slots=2)
    for number in range(2):
        made.add(request("a", number, priority=-1))
    made.step()
    made.add(request("b", 1))
    for _ in range(20):
        made.step()
    assert running(made) == {"a": 2}


def test_answers_are_the_same_whoever_else_is_there() -> None:
    def answers(made: Engine) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        while made.has_work:
            for output in made.step():
                found.setdefault(output.request_id, []).extend(output.tokens)
        return found

    alone: dict[str, list[int]] = {}
    for tenant in ("a", "b"):
        for number in range(12):
            single = engine()
            single.add(request(tenant, number, tokens=30))
            alone |= answers(single)
    made = engine(slots=4, blocks=40)
    found: dict[str, list[int]] = {}
    for number in range(12):
        made.add(request("a", number, tokens=30))
    for number in range(12):
        made.add(request("b", number, tokens=30))
        for _ in range(3):
            for output in made.step():
                found.setdefault(output.request_id, []).extend(output.tokens)
    for name, tokens in answers(made).items():
        found.setdefault(name, []).extend(tokens)
    assert made.stats().preemptions > 0
    assert found == alone


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=0", "a=-1", "a=nan", "a=1e9", "a=2;b=3"])
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        EngineOptions(tenant_weights=text)


def test_weights_are_read_from_a_list() -> None:
    assert EngineOptions(tenant_weights=" a=2, b=0.5 ,").weights == {"a": 2.0, "b": 0.5}
