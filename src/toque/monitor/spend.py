"""What each tenant and key has spent in the running month (UTC): list prices, for budgets."""

from __future__ import annotations

import calendar
import threading
import time
from collections.abc import Callable, Mapping

from toque.monitor.cost import Budget, BudgetDecision, decide, strictest
from toque.monitor.ledger.record import UsageRecord

REFRESH_S = 30.0
WARNING_HEADER = b"x-toque-budget-warning"


class Spend:
    """The ledger's sum for the month, as last read, and what this process has closed itself, at once.

    What other gateways of the same database close counts after `REFRESH_S` at most. Thread-safe.
    """

    def __init__(
        self,
        tenants: Mapping[str, Budget] | None = None,
        keys: Mapping[str, Budget] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tenants = dict(tenants or {})
        self._keys = dict(keys or {})
        self._clock = clock
        self._lock = threading.Lock()
        self._month, self._ends = month_of(clock())
        self._elsewhere: dict[tuple[str, str], int] = {}  # by kind and name; not closed by this process
        self._here: dict[tuple[str, str], int] = {}

    @property
    def wanted(self) -> bool:
        """Whether there is any budget to keep."""
        return bool(self._tenants or self._keys)

    def add(self, record: UsageRecord) -> None:
        """A row of this process was closed."""
        if record.list_nano and self.wanted:
            with self._lock:
                self._turn()
                for name in (("tenant", record.tenant), ("key", record.key_id)):
                    self._here[name] = self._here.get(name, 0) + record.list_nano

    def read(self, month: int, sums: Mapping[tuple[str, str], int]) -> None:
        """What the ledger says of the month that begins at ``month``, by tenant and key, without this process."""
        with self._lock:
            self._turn()
            if month != self._month:
                return
            self._elsewhere = {}
            for (tenant, key), amount in sums.items():
                for name in (("tenant", tenant), ("key", key)):
                    self._elsewhere[name] = self._elsewhere.get(name, 0) + amount

    def spent(self, kind: str, name: str) -> int:
        """Of a ``tenant`` or a ``key``, in nano."""
        with self._lock:
            self._turn()
            return self._elsewhere.get((kind, name), 0) + self._here.get((kind, name), 0)

    def decide(self, tenant: str, key: str) -> BudgetDecision:
        """Whether this caller may begin another request."""
        left = self._ends - self._clock()
        decisions = [
            decide(self.spent(kind, name), budget, left, f"this {kind}")
            for kind, name, budget in (
                ("tenant", tenant, self._tenants.get(tenant)),
                ("key", key, self._keys.get(key)),
            )
            if budget is not None
        ]
        return strictest(decisions)

    def _turn(self) -> None:
        """A new month begins with nothing spent."""
        if self._clock() >= self._ends:
            self._month, self._ends = month_of(self._clock())
            self._elsewhere.clear()
            self._here.clear()


def month_of(moment: float) -> tuple[int, int]:
    """When the month of ``moment`` begins and ends: seconds since the epoch, UTC."""
    at = time.gmtime(moment)
    begin = calendar.timegm((at.tm_year, at.tm_mon, 1, 0, 0, 0))
    return begin, begin + calendar.monthrange(at.tm_year, at.tm_mon)[1] * 86_400
