"""Moments as people write them."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from toque.errors import RequestError

_AGO = re.compile(r"(\d{1,6})([mhdw])")
_UNIT = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def moment(text: str, *, param: str, now: float | None = None) -> int:
    """Seconds since the epoch of ``24h`` (ago), ``2026-09-01``, ``2026-09-01T12:00`` (UTC unless it says), or a number.

    RequestError names ``param`` when it is none of these.
    """
    given = text.strip()
    if ago := _AGO.fullmatch(given):
        return max(0, int((time.time() if now is None else now) - int(ago[1]) * _UNIT[ago[2]]))
    if given.isascii() and given.isdigit() and len(given) <= 12:
        return int(given)
    try:
        parsed = datetime.fromisoformat(given)
    except ValueError:
        raise RequestError(
            f"{param} is a moment such as 24h, 7d, 2026-09-01 or 2026-09-01T12:00Z, got {text[:40]!r}",
            param=param,
        ) from None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=UTC)
    return max(0, int(parsed.timestamp()))
