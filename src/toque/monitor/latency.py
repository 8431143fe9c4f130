"""Percentiles of the last 1, 5 and 60 minutes, per model: what `toque top` and ``/admin/v1/stats`` show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from toque.monitor.sketch import Sketch

WINDOWS_S = (60, 300, 3_600)
FINE_S, COARSE_S = 5, 60  # the windows' grain: up to 5 minutes, and beyond
QUANTILES = (0.5, 0.95, 0.99)
MEASURES = ("ttft", "inter_token", "e2e", "queue")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds. All 0.0 when ``count`` is 0."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


class Rolling:
    """A sketch per slot of time; a window is the merge of its slots. Values within 1%, time within one slot."""

    __slots__ = ("_coarse", "_fine")

    def __init__(self) -> None:
        self._fine: dict[int, Sketch] = {}
        self._coarse: dict[int, Sketch] = {}

    def add(self, value: float, now: float, times: int = 1) -> None:
        slot = int(now / FINE_S)
        sketch = self._fine.get(slot)
        if sketch is None:
            sketch = self._begin(slot, now)
        sketch.add(value, times)

    def window(self, seconds: float, now: float) -> Sketch:
        """Everything of the last ``seconds``, with the running slot."""
        merged = Sketch()
        for slot, sketch in list(self._fine.items()):
            if slot * FINE_S > now - min(seconds, 300) - FINE_S:
                merged.merge(sketch)
        if seconds > 300:
            for slot, sketch in list(self._coarse.items()):
                if slot * COARSE_S > now - seconds - COARSE_S:
                    merged.merge(sketch)
        return merged

    def _begin(self, slot: int, now: float) -> Sketch:
        """Open a slot. Slots that leave the fine range move into the coarse one, whole, so nothing counts twice."""
        fine, coarse = self._fine, self._coarse
        for old in [s for s in fine if s * FINE_S <= now - 300 - FINE_S]:
            place = coarse.setdefault(old * FINE_S // COARSE_S, Sketch())
            place.merge(fine.pop(old))
        for gone in [s for s in coarse if s * COARSE_S <= now - WINDOWS_S[-1] - COARSE_S]:
            del coarse[gone]
        sketch = fine[slot] = Sketch()
        return sketch


class Latencies:
    """One `Rolling` per model and measure. Models are those that are served, so the set is bounded."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rolling: dict[tuple[str, str], Rolling] = {}

    def rolling(self, model: str, measure: str) -> Rolling:
        """Where values of this kind go; for whoever adds many and knows the time."""
        rolling = self._rolling.get((model, measure))
        if rolling is None:
            rolling = self._rolling[model, measure] = Rolling()
        return rolling

    def add(self, model: str, measure: str, value: float, times: int = 1) -> None:
        self.rolling(model, measure).add(value, self._clock(), times)

    def snapshot(self) -> dict[str, dict[str, dict[str, Percentiles]]]:
        """``[model][measure][window]``, windows named ``1m``, ``5m``, ``60m``."""
        now = self._clock()
        found: dict[str, dict[str, dict[str, Percentiles]]] = {}
        for (model, measure), rolling in list(self._rolling.items()):
            windows = found.setdefault(model, {}).setdefault(measure, {})
            for seconds in WINDOWS_S:
                sketch = rolling.window(seconds, now)
                p50, p95, p99 = sketch.quantiles(QUANTILES)
                windows[f"{seconds // 60}m"] = Percentiles(sketch.count, sketch.mean, p50, p95, p99)
        return found
