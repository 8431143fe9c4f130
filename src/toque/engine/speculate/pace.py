"""How far to guess: what guesses are likely to bring, against what their rows cost, both as measured."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

EVIDENCE = 16  # kinds of evidence that are told apart; more than the last kind counts as the last
_OWN_RATE = 0.12  # weight of a sequence's newest guess in what it believes
_SHARED_RATE = 0.02
_BELIEF_RANGE = (0.02, 0.99)

_LEVEL_RATE = 0.2
_SHAPE_RATE = 0.15
LEAST_GAIN = 1.06  # guessing must promise this much more than a plain step
_FORGOTTEN = 0.997  # of what was measured of a size, what is left a step later if it was not measured again
_ROW_SHARE = 0.15  # of a step's fixed cost, what one more row costs where nothing was measured
_OUTLIER = math.log(2.0)


class Beliefs:
    """How often guesses come true, by their evidence: one number for each kind, in 0..1.

    A new sequence begins with what all before it found, then goes its own way.
    """

    def __init__(self, first: Many[float]) -> None:
        """``first``: what to believe of each kind of evidence before anything was seen."""
        self._shared = list(first)

    def new(self) -> list[float]:
        return list(self._shared)

    def learn(self, own: list[float], evidence: int, right: int, wrong: bool) -> None:
        """Of a guess that began with ``evidence`` the first ``right`` tokens came true, and the next did not."""
        for index in range(evidence, evidence + right + wrong):
            kind = min(index, EVIDENCE - 1)
            outcome = 1.0 if index < evidence + right else 0.0
            own[kind] += _OWN_RATE * (outcome - own[kind])
            self._shared[kind] += _SHARED_RATE * (outcome - self._shared[kind])

    @staticmethod
    def gains(own: list[float], evidence: int, most: int) -> list[float]:
        """Expected tokens from the first, second, ... drafted token: each needs all before it."""
        low, high = _BELIEF_RANGE
        gains, all_right = [], 1.0
        for index in range(evidence, evidence + most):
            all_right *= min(max(own[min(index, EVIDENCE - 1)], low), high)
            gains.append(all_right)
        return gains


class StepCost:
    """Seconds of a step by its rows, from steps that only decode.

    Two things are kept apart: the *level* (how fast the machine is now, how long the contexts are), which moves all
    sizes together, and the *shape*, each size's own deviation from a straight line. Only the shape decides whether
    guesses pay, and it does not take a busy minute for a costly size. Unmeasured sizes are judged by their neighbours
    and, as what was measured long ago is forgotten, by an optimistic line: what once looked dear is tried again.
    """

    def __init__(self) -> None:
        self._level: float | None = None
        self._shape: dict[int, tuple[float, int, int]] = {}  # rows → (deviation, when, how often)
        self._now = 0

    def observe(self, rows: int, seconds: float) -> None:
        measured = math.log(max(seconds, 1e-9)) - _line(rows)
        self._now += 1
        if self._level is None:
            self._level = measured
        deviation, _, times = self._shape.get(rows, (0.0, 0, 0))
        error = measured - self._level - self._deviation(rows)
        bounded = min(max(error, -_OUTLIER), _OUTLIER)
        if times:
            self._level += _LEVEL_RATE * bounded
            rate = max(_SHAPE_RATE, 1.0 / (times + 1))
            deviation = self._deviation(rows) + rate * (1.0 - _LEVEL_RATE) * bounded
        else:
            deviation = measured - self._level
        self._shape[rows] = (deviation, self._now, times + 1)

    def seconds(self, first: int, count: int) -> list[float]:
        """Of steps of ``first``, ``first + 1``, ... rows; ``count`` of them. Zeros before the first measurement."""
        if self._level is None:
            return [0.0] * count
        known = sorted(self._shape)
        deviations = [self._deviation(rows) for rows in known]
        result, at = [], 0
        for rows in range(first, first + count):
            while at < len(known) and known[at] <= rows:
                at += 1
            if at == 0:
                deviation = deviations[0]
            elif at == len(known):
                deviation = deviations[-1]
            else:
                low, high = known[at - 1], known[at]
                share = (rows - low) / (high - low)
                deviation = deviations[at - 1] + share * (deviations[at] - deviations[at - 1])
            result.append(math.exp(self._level + _line(rows) + deviation))
        return result

    def _deviation(self, rows: int) -> float:
        if rows not in self._shape:
            return 0.0
        deviation, when, _ = self._shape[rows]
        return float(deviation * _FORGOTTEN ** (self._now - when))


def _line(rows: int) -> float:
    return math.log(1.0 + _ROW_SHARE * rows)


def best_counts(
    gains: Many[list[float]], seconds: Many[float], sure: int, round_seconds: float = 0.0
) -> list[int]:
    """How many tokens to draft for each sequence, so that a step yields the most tokens per second.

    ``gains[i]`` are sequence i's expected tokens, falling. ``seconds[n]`` is what a step with n drafted tokens costs;
    ``sure`` tokens come in any case. ``round_seconds`` are added for the longest draft, once for each of its tokens.
    Gains fall within a sequence, so the best n drafts of all are each sequence's first ones.
    """
    counts = [0] * len(gains)
    if not seconds or seconds[0] <= 0.0:
        return counts  # nothing is measured yet: a plain step first
    ranked = sorted(
        ((gain, -depth, index) for index, row in enumerate(gains) for depth, gain in enumerate(row)),
        reverse=True,
    )
    expected, deepest = float(sure), 0
    best_rate, best = LEAST_GAIN * sure / seconds[0], 0
    for taken, (gain, depth, _) in enumerate(ranked[: len(seconds) - 1], start=1):
        expected += gain
        deepest = max(deepest, 1 - depth)
        rate = expected / (seconds[taken] + deepest * round_seconds)
        if rate > best_rate:
            best_rate, best = rate, taken
    for _, _, index in ranked[:best]:
        counts[index] += 1
    return counts
