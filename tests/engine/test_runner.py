"""The arrays of a step, checked against a plain reading of the plan."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.engines import GREEDY, make_engine, request
from toque.backends.base import StepBatch, StepResult
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.scheduler import StepPlan
from toque.types import SamplingParams


class Recorder(FakeExecutable):
    """Keeps copies of the batches it is given."""

    def step(self, batch: StepBatch) -> StepResult:
        copies = [np.array(getattr(batch, name)) for name in _FIELDS]
        batches.append(StepBatch(*copies))
        return FakeExecutable.step(self, batch)


_FIELDS = ["tokens", "positions", "starts", "context", "block_tables", "rows", "slots", "targets", "top"]
batches: list[StepBatch] = []


@pytest.fixture
def engine() -> Engine:
    batches.clear()
    return make_engine(n_blocks=32, executable=Recorder(block_size=4))


def as_lists(batch: StepBatch) -> dict[str, object]:
    return {name: getattr(batch, name).tolist() for name in _FIELDS}


def test_prefill_and_decode_lie_side_by_side(engine: Engine) -> None:
    engine.add(request("a", [1, 2, 3], SamplingParams(temperature=0, logprobs=2)))
    engine.step()
    assert as_lists(batches[0]) == {
        "tokens": [1, 2, 3],
        "positions": [0, 1, 2],
        "starts": [0, 3],
        "context": [3],
        "block_tables": [[0]],
        "rows": [2],
        "slots": [0],
        "targets": [-1],
        "top": [2],
    }
    first = engine.scheduler.running[0].tokens[-1]
    engine.add(request("b", [9, 8, 7, 6, 5], GREEDY))
    engine.step()
    assert as_lists(batches[1]) == {
        "tokens": [first, 9, 8, 7, 6, 5],
        "positions": [3, 0, 1, 2, 3, 4],
        "starts": [0, 1, 6],
        "context": [4, 5],
        "block_tables": [[0, 0], [1, 2]],
        "rows": [0, 5],
        "slots": [0, 1],
        "targets": [-1, -1],
        "top": [2, -1],
    }
    engine.step()
    assert batches[2].rows.tolist() == [0, 1]
    assert batches[2].block_tables.tolist() == [[0, 3], [1, 2]]  # the first one grew
    assert batches[2].top.tolist() == [2, -1]


def test_scored_rows_have_targets_and_leave_no_trace_in_later_steps(engine: Engine) -> None:
    engine.add(request("s", [1, 2, 3, 4], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)))
    engine.step()
    assert as_lists(batches[0]) | {"block_tables": 0} == {
        "tokens": [1, 2, 3, 4],
        "positions": [0, 1, 2, 3],
        "starts": [0, 4],
        "context": [4],
        "block_tables": 0,
        "rows": [0, 1, 2, 3],
        "slots": [0, 0, 0, 0],
        "targets": [2, 3, 4, -1],
        "top": [1, 1, 1, -1],
    }
    engine.step()
    assert batches[1].targets.tolist() == [-1]
    assert batches[1].top.tolist() == [-1]


def test_a_chunk_in_the_middle_of_a_prompt_asks_for_no_logits() -> None:
    batches.clear()
    engine = make_engine(n_blocks=32, max_batch_tokens=4, executable=Recorder(block_size=4))
    engine.add(request("a", range(1, 10)))
    for _ in range(3):
        engine.step()
    assert [batch.rows.tolist() for batch in batches] == [[], [], [0]]
    assert [batch.positions.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_slot_shows_nothing_of_who_had_it_before(engine: Engine) -> None:
    engine.add(request("long", range(1, 30), SamplingParams(temperature=0, max_tokens=1)))
    engine.step()
    engine.add(request("short", [1, 2], SamplingParams(temperature=0, max_tokens=9)))
    engine.add(request("other", range(30, 60), SamplingParams(temperature=0, max_tokens=9)))
    engine.step()
    short = batches[1].block_tables[0]
    assert len(short) == 8
    assert not short[1:].any()


def test_an_empty_plan_is_never_executed() -> None:
    engine = make_engine()
    assert StepPlan().empty
    assert engine.step() == []
    assert isinstance(engine.executable, FakeExecutable)
    assert engine.executable.steps == 0
