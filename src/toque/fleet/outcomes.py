"""What clients saw of two versions, compared: the judge of a canary."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from toque.fleet.spec import RolloutPolicy
from toque.routing.base import LATENCY_BOUNDS, VersionOutcomes


class Verdict(Struct, frozen=True):
    """``bad``: why the new version has to go, "" if it need not. ``enough``: it has had as many requests as a step
    asks for. ``progress``: how many those are, for people."""

    bad: str
    enough: bool
    progress: str


def total(every: Iterable[VersionOutcomes]) -> VersionOutcomes:
    """The sum over gateways."""
    summed = VersionOutcomes()
    for each in every:
        summed = _combine(summed, each, 1)
    return summed


def difference(later: VersionOutcomes, earlier: VersionOutcomes) -> VersionOutcomes:
    """What came between two sums. A count that went back (a gateway is gone) counts as nothing."""
    return _combine(later, earlier, -1)


def percentile(counts: tuple[int, ...], fraction: float) -> float:
    """Seconds below which ``fraction`` of a histogram over LATENCY_BOUNDS lies; 0.0 for an empty one.

    Between two bounds it is interpolated; they are 26 % apart, which bounds the error.
    """
    wanted = fraction * sum(counts)
    if wanted <= 0:
        return 0.0
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            if index >= len(LATENCY_BOUNDS):
                return LATENCY_BOUNDS[-1]
            low = LATENCY_BOUNDS[index - 1] if index else 0.0
            return low + (LATENCY_BOUNDS[index] - low) * (wanted - below) / count
        below += count
    return LATENCY_BOUNDS[-1]


def judge(
    old: VersionOutcomes, new: VersionOutcomes, old_ever: VersionOutcomes, policy: RolloutPolicy
) -> Verdict:
    """``old`` and ``new`` are what was counted during a step, ``old_ever`` all that is known of the old version: it
    stands in where the step has too little of the old one.

    Errors are judged at once, as the share they would be of ``min_requests``; latencies only once there are so many.
    """
    if old.requests < policy.min_requests:
        old = old_ever
    enough = new.requests >= policy.min_requests
    progress = f"{min(new.requests, policy.min_requests)} of {policy.min_requests} requests"
    usual = old.errors / old.requests if old.requests else 0.0
    rate = new.errors / max(new.requests, policy.min_requests)
    if new.errors and rate > usual + policy.max_error_rate:
        return Verdict(
            f"{new.errors} of {new.requests} requests failed on the new version, {usual:.1%} on the old one "
            f"(at most {policy.max_error_rate:.1%} more are allowed)",
            enough,
            progress,
        )
    if min(new.answered, old.answered) >= policy.min_requests:
        for what, before, after in (
            ("time to the first token", old.ttft_counts, new.ttft_counts),
            ("time per token", old.tpot_counts, new.tpot_counts),
        ):
            was, now = percentile(before, 0.95), percentile(after, 0.95)
            if was > 0 and now > was * policy.max_latency_ratio:
                return Verdict(
                    f"the p95 {what} is {now * 1e3:.0f} ms on the new version, {was * 1e3:.0f} ms on the old one "
                    f"(at most {policy.max_latency_ratio:g} times as long is allowed)",
                    enough,
                    progress,
                )
    return Verdict("", enough, progress)


def _combine(a: VersionOutcomes, b: VersionOutcomes, sign: int) -> VersionOutcomes:
    return VersionOutcomes(
        requests=max(0, a.requests + sign * b.requests),
        errors=max(0, a.errors + sign * b.errors),
        answered=max(0, a.answered + sign * b.answered),
        ttft_seconds=max(0.0, a.ttft_seconds + sign * b.ttft_seconds),
        tpot_seconds=max(0.0, a.tpot_seconds + sign * b.tpot_seconds),
        ttft_counts=_add(a.ttft_counts, b.ttft_counts, sign),
        tpot_counts=_add(a.tpot_counts, b.tpot_counts, sign),
    )


def _add(a: tuple[int, ...], b: tuple[int, ...], sign: int) -> tuple[int, ...]:
    length = max(len(a), len(b))
    padded = zip(a + (0,) * (length - len(a)), b + (0,) * (length - len(b)), strict=True)
    return tuple(max(0, x + sign * y) for x, y in padded)
