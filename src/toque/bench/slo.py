"""A service level objective: what a request must keep to count as good."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toque.bench.client import Record
from toque.errors import ConfigError

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_NAMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; None leaves one out. ``itl`` holds when no gap of the answer is longer."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From ``ttft=500ms,itl=50ms,e2e=4s``. Raises ConfigError, which names ``--slo`` and the wrong part."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", value)
            if name not in _NAMES or not match or name in bounds or float(match[1]) <= 0:
                known = ", ".join(_NAMES)
                raise ConfigError(
                    f"--slo must be like ttft=500ms,itl=50ms,e2e=4s (once each of {known}), got {part[:40]!r}",
                    param="slo",
                )
            bounds[name] = float(match[1]) / _PER_SECOND[match[2]]
        return cls(**bounds)

    def met_by(self, record: Record) -> bool:
        """A failed request meets nothing. A bound on gaps holds where an answer has none."""
        if not record.ok:
            return False
        measured = (
            (self.ttft, record.ttft),
            (self.tpot, record.tpot),
            (self.itl, max(record.gaps, default=None)),
            (self.e2e, record.e2e),
        )
        return all(bound is None or value is None or value <= bound for bound, value in measured)

    def __str__(self) -> str:
        bounds = {name: getattr(self, name) for name in _NAMES}
        return ",".join(f"{k}={v * 1e3:g}ms" for k, v in bounds.items() if v is not None)
