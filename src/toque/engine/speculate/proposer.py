"""The contract of what guesses tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from toque.engine.sequence import Sequence

NO_LEAD = -1


class Proposer(Protocol):
    """Guesses how sequences go on. Called from the engine's thread; a slot belongs to one sequence at a time.

    Guesses may be wrong, never harmful: whatever is proposed is verified.
    """

    free: bool  # a guess costs so little that one may be made only to learn from it
    round_seconds: float  # what one more token for every sequence costs, as measured lately

    @property
    def beliefs(self) -> Many[float]:
        """How often to expect guesses to come true before any was seen, by evidence (`pace.EVIDENCE` kinds of it)."""

    def open(self, sequence: Sequence) -> None:
        """The sequence begins (or begins again after preemption) in ``sequence.slot``."""

    def close(self, slot: int) -> None:
        """The slot's sequence ended or was preempted. A slot that is not open is left alone."""

    def leads(self, sequences: Many[Sequence]) -> list[int]:
        """How good a guess for each would be, as a small number whose meaning is the proposer's own; NO_LEAD: none.

        A guess's first token has the lead as its evidence, and each further one has one more (see `Pace`).
        """

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[list[int]]:
        """At most so many tokens (1 or more) for each. Only of sequences that had a lead since their last token."""

    def close_all(self) -> None:
        """Nothing is called afterwards."""
