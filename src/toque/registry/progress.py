"""What a pull tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["wait", "download", "verify"]


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
