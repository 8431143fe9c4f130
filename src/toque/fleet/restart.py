"""When a replica that ended is started again: a pure policy, without clocks of its own."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DELAY_S = 30.0
REFUSED_STATUS = 2  # a replica's exit status for a wrong model or setting


@dataclass(frozen=True, slots=True)
class Restart:
    """``hopeless``: it fails the same way each time; people should be told rather than kept waiting."""

    delay_s: float
    hopeless: bool


class RestartPolicy:
    """The first restart is at once; then the delay doubles from ``first_delay_s`` to ``max_delay_s``. A process that
    was ready for ``settled_s`` starts with a clean record. It is a crash loop after the second end in a row without
    having been ready in between, and at the first that says the model or a setting is wrong."""

    def __init__(
        self, *, first_delay_s: float = 0.5, max_delay_s: float = MAX_DELAY_S, settled_s: float = 10.0
    ) -> None:
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._settled_s = settled_s
        self._ends = 0  # since it last settled
        self._never_ready = 0  # in a row

    @property
    def restarts(self) -> int:
        return self._ends

    def ended(self, *, ready_s: float | None, status: int | None) -> Restart:
        """``ready_s`` is how long the process had been ready (None: it never was), ``status`` how it ended."""
        if ready_s is not None:
            self._never_ready = 0
            if ready_s >= self._settled_s:
                self._ends = 0
        else:
            self._never_ready += 1
        self._ends += 1
        refused = status == REFUSED_STATUS
        exponent = min(self._ends - 1 + refused, 32)
        delay = 0.0 if exponent == 0 else min(self._max_delay_s, self._first_delay_s * 2.0 ** (exponent - 1))
        return Restart(delay, hopeless=refused or self._never_ready >= 2)
