"""One step's guesses: what is proposed, how much of it pays, and what became of it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from toque.engine.speculate.pace import Beliefs, StepCost, best_counts
from toque.engine.speculate.proposer import NO_LEAD, Proposer

if TYPE_CHECKING:
    from toque.engine.scheduler import Scheduler, StepPlan
    from toque.engine.sequence import Sequence

_log = logging.getLogger(__name__)


class _Hope:
    """What one slot's sequence has been guessed to say, to be compared with what it says."""

    __slots__ = ("at", "beliefs", "evidence", "tokens")

    def __init__(self, beliefs: list[float]) -> None:
        self.beliefs = beliefs
        self.at = 0
        self.evidence = 0
        self.tokens: list[int] = []


class Speculator:
    """Adds drafted tokens to a step's decodes where they are expected to pay.

    Guarantees: drafts take only what the step's sure work leaves of tokens, rows and free KV blocks; where guesses do
    not come true, or rows cost more than they bring, it falls back to plain steps by itself; where the proposer fails,
    for good.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        self.proposer = proposer
        self.most = most
        self.cost = StepCost()
        self.drafted = 0  # tokens verified so far
        self.accepted = 0  # of those, how many plain decoding chose too
        self._beliefs = Beliefs(proposer.beliefs)
        self._hopes: dict[int, _Hope] = {}
        self.failed = False
        self._spent = 0.0  # seconds of the step that is being planned

    def open(self, sequence: Sequence) -> None:
        self._hopes[sequence.slot] = _Hope(self._beliefs.new())
        self.proposer.open(sequence)

    def close(self, slot: int) -> None:
        if self._hopes.pop(slot, None) is not None:
            self.proposer.close(slot)

    def close_all(self) -> None:
        self._hopes.clear()
        self.proposer.close_all()

    def draft(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Give the decodes of a plan their drafts; the blocks they need are taken from the scheduler."""
        if self.failed:
            return
        began = time.perf_counter()
        try:
            self._draft(plan, scheduler)
        except Exception:
            # No request may suffer from a guess: from here on there are none.
            self.failed = True
            _log.exception("speculation is switched off: %s failed", type(self.proposer).__name__)
        self._spent = time.perf_counter() - began

    def _draft(self, plan: StepPlan, scheduler: Scheduler) -> None:
        spare = scheduler.spare(plan)
        if spare <= 0:
            return
        leads = self.proposer.leads(plan.decodes)
        hopeful: list[tuple[Sequence, int, list[float]]] = []
        for sequence, lead in zip(plan.decodes, leads, strict=True):
            hope = self._hopes[sequence.slot]
            self._learn(sequence, hope)
            left = min(self.most, sequence.end - len(sequence.tokens) - 1)
            if lead != NO_LEAD and left > 0:
                hopeful.append((sequence, lead, self._beliefs.gains(hope.beliefs, lead, left)))
        if not hopeful:
            return
        sure = len(plan.decodes)
        most = min(spare, sum(len(gains) for _, _, gains in hopeful))
        counts = best_counts(
            [gains for _, _, gains in hopeful],
            self.cost.seconds(sure, most + 1),
            sure,
            self.proposer.round_seconds,
        )
        granted: list[Sequence] = []
        sizes: list[int] = []
        for (sequence, lead, _), count in zip(hopeful, counts, strict=True):
            hope = self._hopes[sequence.slot]
            hope.at, hope.evidence = len(sequence.tokens), lead
            if count:
                count = scheduler.room_for(sequence, count, plan)
            if count:
                granted.append(sequence)
                sizes.append(count)
            elif self.proposer.free:
                # Not worth a row, but worth knowing whether it would have come true.
                hope.tokens = self.proposer.propose([sequence], [1])[0]
        if not granted:
            return
        for sequence, tokens in zip(granted, self.proposer.propose(granted, sizes), strict=True):
            sequence.draft = tokens
            plan.drafted += len(tokens)
            self._hopes[sequence.slot].tokens = tokens

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, from planning on."""
        if plan.decodes and not plan.chunks:
            self.cost.observe(len(plan.decodes) + plan.drafted, seconds - self._spent)

    def _learn(self, sequence: Sequence, hope: _Hope) -> None:
        guessed = hope.tokens
        if not guessed:
            return
        said = sequence.tokens
        right = 0
        for guess, token in zip(guessed, said[hope.at : hope.at + len(guessed)], strict=False):
            if guess != token:
                break
            right += 1
        seen = len(said) - hope.at
        self._beliefs.learn(hope.beliefs, hope.evidence, right, right < min(len(guessed), seen))
        hope.tokens = []
