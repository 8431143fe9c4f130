"""How fast a replica works while it works: the autoscaler's measure of what a queue means in seconds."""

from __future__ import annotations

from toque.types import EngineStats

_WEIGHT = 0.3  # of the newest measurement
_LEAST_DEVICE_S = 0.05  # less computing than this says little


class ServiceRate:
    """Tokens (prompt and generated) per second of computing, over all replicas of a deployment: idle time does not
    make it small. ``per_second`` is 0 until there was something to measure."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._before: dict[tuple[str, int], tuple[int, float]] = {}

    def observe(self, stats: dict[tuple[str, int], EngineStats]) -> None:
        """``stats``: the newest of each replica process, by (replica id, epoch). Others are forgotten."""
        tokens, seconds = 0, 0.0
        now = {key: (s.prompt_tokens + s.generated_tokens, s.device_seconds) for key, s in stats.items()}
        for key, (total, computed) in now.items():
            before = self._before.get(key)
            if before is not None and computed - before[1] < _LEAST_DEVICE_S:
                now[key] = before  # measured together with what comes
            elif before is not None:
                tokens += total - before[0]
                seconds += computed - before[1]
        self._before = now
        if seconds > 0 and tokens > 0:
            rate = tokens / seconds
            self.per_second = (
                rate if not self.per_second else self.per_second + _WEIGHT * (rate - self.per_second)
            )
