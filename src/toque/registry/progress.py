"""What a pull tells whoever watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["wait", "download", "verify", "upload"]


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` bytes of ``file``; ``total`` is None while unknown. "wait": another process is at it."""

    stage: Stage
    file: str
    done: int = 0
    total: int | None = None


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The report of nobody."""


class LogProgress:
    """A report for whoever has only a log: a line when something begins and at each quarter of it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._quarters: dict[tuple[str, str], int] = {}

    def __call__(self, progress: Progress) -> None:
        key = (progress.stage, progress.file)
        quarter = 4 * progress.done // progress.total if progress.total else 0
        if self._quarters.get(key, -1) >= quarter:
            return
        self._quarters[key] = quarter
        if progress.stage == "wait":
            self._log.info("waiting for another process that pulls %s", progress.file)
        elif progress.stage == "download":
            total = f" of {progress.total / 1e6:.0f} MB" if progress.total else ""
            self._log.info("downloading %s: %.0f%s", progress.file, progress.done / 1e6, total or " MB")
