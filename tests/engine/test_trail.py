"""What an engine tells of each request's way through its steps."""

from __future__ import annotations

from fixtures.engines import make_engine, request
from toque.engine.engine import Engine
from toque.engine.trail import MAX_EVENTS
from toque.types import SamplingParams, SequenceOutput, StepEvent, StepEventKind

SCHEDULED, PREFILL, PREEMPTED = StepEventKind.SCHEDULED, StepEventKind.PREFILL, StepEventKind.PREEMPTED


def run(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def events_of(outputs: list[SequenceOutput], request_id: str) -> list[StepEvent]:
    return [event for o in outputs if o.request_id == request_id for event in o.events or ()]


def test_the_first_output_tells_of_the_admission_and_of_each_chunk() -> None:
    engine = make_engine(n_blocks=32, max_batch_tokens=8)
    engine.add(request("a", range(20)))
    outputs = run(engine)
    events = events_of(outputs, "a")
    assert [(e.kind, e.tokens, e.step) for e in events] == [
        (SCHEDULED, 0, 0),
        (PREFILL, 8, 0),
        (PREFILL, 8, 1),
        (PREFILL, 4, 2),
    ]
    assert sorted(e.at_us for e in events) == [e.at_us for e in events]
    assert outputs[0].events == events
    assert all(output.events is None for output in outputs[1:])


def test_an_admission_says_what_the_prefix_cache_had() -> None:
    engine = make_engine(n_blocks=32)
    engine.add(request("a", range(20)))
    run(engine)
    engine.add(request("b", range(20)))
    scheduled, prefill = events_of(run(engine), "b")
    assert (scheduled.kind, scheduled.tokens) == (SCHEDULED, 16)
    assert (prefill.kind, prefill.tokens) == (PREFILL, 4)


def test_preemption_is_told_when_the_request_is_back() -> None:
    engine = make_engine(n_blocks=7, context_length=28, prefix_cache=False)
    sampling = SamplingParams(temperature=0, max_tokens=16)
    engine.add(request("a", range(8), sampling))
    engine.add(request("b", range(10, 18), sampling))
    outputs = run(engine)
    assert engine.stats().preemptions >= 1
    told = events_of(outputs, "b")
    preempted = [event for event in told if event.kind is PREEMPTED]
    assert len(preempted) == engine.stats().preemptions
    assert preempted[0].tokens > 8
    computed = sum(event.tokens for event in told if event.kind is PREFILL)
    assert computed == 8 + sum(event.tokens for event in preempted)
    assert [event.at_us for event in told] == sorted(event.at_us for event in told)


def test_what_was_not_told_yet_comes_with_the_end() -> None:
    engine = make_engine(n_blocks=32, max_batch_tokens=4)
    engine.add(request("a", range(20)))
    engine.step()
    engine.abort("a")
    (output,) = run(engine)
    assert [event.kind for event in output.events or ()] == [SCHEDULED, PREFILL]


def test_a_prompt_of_many_chunks_is_told_in_bounded_space() -> None:
    n = 4 * (MAX_EVENTS + 40)
    engine = make_engine(n_blocks=n, context_length=2 * n, max_batch_tokens=4)
    engine.add(request("a", [i % 60 for i in range(n)]))
    told = events_of(run(engine), "a")
    assert len(told) == MAX_EVENTS
    assert sum(event.tokens for event in told if event.kind is PREFILL) == n
