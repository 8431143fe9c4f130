"""What the gateways report, added up by deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from toque.fleet.outcomes import total
from toque.fleet.store import Reported
from toque.routing.base import VersionOutcomes

FRESH_S = 5.0  # what a gateway said before counts as nothing: it is gone, or cut off


class Demand(Struct, frozen=True):
    """Requests at all gateways. ``idle_s``: since the last one, None where no gateway says. ``stranded``: those that
    have lost their replica, by revision."""

    waiting: int = 0
    waiting_s: float = 0.0
    running: int = 0
    idle_s: float | None = None
    ttft_p95_s: float = 0.0
    stranded: Mapping[str, int] = {}

    @property
    def requests(self) -> int:
        return self.waiting + self.running


class Signals:
    """The latest report of each gateway, and what was counted of each version while any gateway ever talked."""

    def __init__(self) -> None:
        self._fresh: dict[str, list[Reported]] = {}
        self._counts: dict[tuple[str, str], dict[str, VersionOutcomes]] = {}  # deployment, version → gateway

    def hear(self, reported: Iterable[Reported], now: float) -> None:
        """All that there is: what is not among them was not said."""
        self._fresh = {}
        for each in reported:
            if now - each.at <= FRESH_S:
                self._fresh.setdefault(each.signals.deployment, []).append(each)
            for version, outcomes in each.signals.outcomes.items():
                self._counts.setdefault((each.signals.deployment, version), {})[each.gateway_id] = outcomes

    def demand(self, deployment: str, now: float) -> Demand:
        heard = self._fresh.get(deployment, [])
        if not heard:
            return Demand()
        signals = [each.signals for each in heard]
        busy = any(each.waiting or each.running for each in signals)
        return Demand(
            waiting=sum(each.waiting for each in signals),
            waiting_s=max(each.waiting_s for each in signals),
            running=sum(each.running for each in signals),
            idle_s=0.0 if busy else min(each.signals.idle_s + max(0.0, now - each.at) for each in heard),
            ttft_p95_s=max(each.ttft_p95_s for each in signals),
            stranded=dict(sum((Counter(each.stranded) for each in signals), Counter())),
        )

    def outcomes(self, deployment: str, version: str) -> VersionOutcomes:
        return total(self._counts.get((deployment, version), {}).values())

    def forget(self, known: Mapping[str, Iterable[str]]) -> None:
        """Drops the counts of other deployments and versions than these."""
        keep = {(deployment, version) for deployment, versions in known.items() for version in versions}
        for key in [key for key in self._counts if key not in keep]:
            del self._counts[key]
