"""An embedding engine behind requests and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from toque.engine.embedding_steps import EmbeddingSteps
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, EngineError, RequestError
from toque.types import EngineRequest, FinishReason, SamplingParams


class Counting:
    """A vector is the text's length and its sum; ``batches`` is what each step was given."""

    context_length = 16
    vocab_size = 50
    dimension = 2

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def embed(self, inputs: Sequence[Sequence[int]]) -> Any:
        self.batches.append([tuple(ids) for ids in inputs])
        return np.array([[len(ids), sum(ids)] for ids in inputs], np.float32)

    def close(self) -> None: ...


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made() -> tuple[EmbeddingSteps, Counting, Clock]:
    engine: Any = Counting()
    clock = Clock()
    options = EngineOptions(max_batch_tokens=10, max_sequences=3)
    return EmbeddingSteps(engine, options, clock), engine, clock


def text(name: str, *ids: int, **fields: Any) -> EngineRequest:
    return EngineRequest(name, ids, SamplingParams(max_tokens=0), **fields)


def test_texts_of_all_requests_share_steps_that_fit(made: Any) -> None:
    steps, engine, _ = made
    for i in range(5):
        steps.add(text(f"r{i}", *([i + 1] * (i + 1))))
    got = {}
    while steps.has_work:
        for output in steps.step():
            assert output.finish_reason is FinishReason.STOP
            assert output.tokens == []
            got[output.request_id] = np.frombuffer(output.embedding, "<f4").tolist()
    assert got == {f"r{i}": [i + 1, (i + 1) ** 2] for i in range(5)}
    assert [[len(ids) for ids in batch] for batch in engine.batches] == [[1, 2, 3], [4, 5]]
    assert steps.stats().prompt_tokens == 15
    assert steps.stats().steps == 2
    assert steps.step() == []


def test_tenants_take_turns_and_priority_goes_first(made: Any) -> None:
    steps, _engine, _ = made
    for i in range(6):
        steps.add(text(f"flood{i}", 1, tenant="flood"))
    steps.add(text("b", 2, tenant="b"))
    steps.add(text("urgent", 3, tenant="c", priority=-1))
    assert [[o.request_id for o in steps.step()] for _ in range(3)] == [
        ["urgent"],
        ["flood0", "b", "flood1"],
        ["flood2", "flood3", "flood4"],
    ]


def test_nothing_overtakes_a_text_that_does_not_fit(made: Any) -> None:
    steps, _engine, _ = made
    steps.add(text("small", 1))
    steps.add(text("large", *[1] * 10))
    steps.add(text("late", 1))
    assert [[o.request_id for o in steps.step()] for _ in range(3)] == [["small"], ["large"], ["late"]]


def test_what_cannot_be_embedded_is_refused_and_what_left_is_not_computed(made: Any) -> None:
    steps, engine, clock = made
    for ids in ((), (50,), (-1,)):
        with pytest.raises(RequestError):
            steps.add(text("bad", *ids))
    with pytest.raises(ContextLengthError):
        steps.add(text("long", *[1] * 17))
    steps.add(text("gone", 1))
    with pytest.raises(EngineError):
        steps.add(text("gone", 1))
    assert steps.abort("gone")
    assert not steps.abort("gone")
    steps.add(text("late", 1, deadline=101.0))
    steps.add(text("in time", 2, deadline=103.0))
    clock.now = 102.0
    late, good = steps.step()
    assert (late.finish_reason, late.error_code) == (FinishReason.ERROR, "deadline_exceeded")
    assert good.queue_seconds == pytest.approx(2.0)
    assert engine.batches == [[(2,)]]
    assert not steps.has_work
