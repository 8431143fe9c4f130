"""The replica with the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """``in_flight`` is what this process has sent and not seen end: exact and current. The rest is the replica's
    last report, up to a second old, and counts what other gateways sent it too."""

    in_flight: int
    requests: int = 0  # running and waiting
    queued_tokens: int = 0
    kv_usage: float = 0.0


def least_load(loads: Sequence[Load]) -> int:
    """The index of the least loaded one; the first of equals. ``loads`` is not empty."""

    def weight(index: int) -> tuple[int, int, float, int]:
        load = loads[index]
        return max(load.in_flight, load.requests), load.queued_tokens, load.kv_usage, index

    return min(range(len(loads)), key=weight)
