"""Whose a step's device time is: split over its requests by the tokens that each had in it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from toque.engine.sequence import Sequence


def attribute(step_us: int, decodes: Many[Sequence], chunks: Many[tuple[Sequence, int]]) -> None:
    """Add to each sequence's ``device_us`` its part of a step of ``step_us`` microseconds.

    A decoding sequence has one token and its drafts in a step, a chunk has its count. Each part is the difference of
    two rounded running sums, so that the parts add up to the whole however many share it.
    """
    total = sum(count for _, count in chunks) + sum(1 + len(sequence.draft) for sequence in decodes)
    done = given = 0
    for sequence in decodes:
        done += 1 + len(sequence.draft)
        upto = step_us * done // total
        sequence.device_us += upto - given
        given = upto
    for sequence, count in chunks:
        done += count
        upto = step_us * done // total
        sequence.device_us += upto - given
        given = upto
