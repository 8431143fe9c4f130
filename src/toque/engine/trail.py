"""What became of each request in the engine's steps: noted as it happens, sent with the next output.

Steps that only decode note nothing, so a request costs a note for its admission, one for each step of its prompt, and
one for each preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.types import StepEvent, StepEventKind

if TYPE_CHECKING:
    from toque.engine.scheduler import StepPlan
    from toque.engine.sequence import Sequence

MAX_EVENTS = 64  # that wait to be sent; more chunks of a prompt are told as one


def note_plan(plan: StepPlan, now: float, step: int) -> None:
    """Who was preempted for this step, and who began or begins again; ``now`` is on the clock of `added_at`."""
    for sequence in plan.victims:
        _note(sequence, StepEventKind.PREEMPTED, now, len(sequence.tokens), step)
    for sequence in plan.admitted:
        _note(sequence, StepEventKind.SCHEDULED, now, sequence.computed, step)


def note_chunks(plan: StepPlan, now: float, step: int) -> None:
    """The step has computed these parts of prompts."""
    for sequence, count in plan.chunks:
        _note(sequence, StepEventKind.PREFILL, now, count, step)


def take(sequence: Sequence) -> list[StepEvent] | None:
    """What has not been sent yet."""
    events = sequence.events
    if not events:
        return None
    sequence.events = []
    return events


def _note(sequence: Sequence, kind: StepEventKind, now: float, tokens: int, step: int) -> None:
    events = sequence.events
    at_us = int((now - sequence.added_at) * 1e6)
    if kind is StepEventKind.PREFILL and len(events) >= MAX_EVENTS and events[-1].kind is kind:
        tokens += events.pop().tokens
    events.append(StepEvent(kind, at_us, tokens, step))
