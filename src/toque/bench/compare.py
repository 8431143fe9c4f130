"""Two measurements side by side: by how much each figure differs, and how sure that is (a bootstrap).

Samples of one repeat resemble each other (same minute, same neighbours), and gaps of one answer even more. So whole
requests are drawn with all their gaps, and with three repeats or more first whole repeats (a two-stage bootstrap, after
Davison and Hinkley, "Bootstrap Methods and their Application", 3.8). The interval is the percentile interval of B / A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from toque.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

Verdict = Literal["better", "worse", "unclear", ""]
_ENOUGH = 3  # repeats, to draw repeats
_AT_ONCE = 4_000_000  # values of resamples held at a time
_RATES = {
    "output tokens/s": "output_tokens_per_second",
    "total tokens/s": "total_tokens_per_second",
    "requests/s": "requests_per_second",
}
_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_STATISTICS: dict[str, float | None] = {"mean": None, "p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of A and of B (seconds, or a rate), B / A with its interval, and what that says: ``unclear`` where the
    interval has 1 in it, empty where there is no interval (a rate of fewer than three repeats)."""

    load: str
    metric: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _Pool:
    """Values in ascending order, the request that each is of, and where each repeat's requests begin."""

    values: Floats
    owners: Counts
    starts: Sequence[int]

    @property
    def requests(self) -> int:
        return self.starts[-1]


def compare(
    a: dict[str, Any], b: dict[str, Any], *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> list[Change]:
    """Every figure of the loads that both documents have, by name. Raises ConfigError if there is none."""
    import numpy as np

    theirs = {result["name"]: result for result in b["results"]}
    pairs = [(result, theirs[result["name"]]) for result in a["results"] if result["name"] in theirs]
    if not pairs:
        names = [", ".join(r["name"] for r in side["results"]) for side in (a, b)]
        raise ConfigError(f"the reports have no load in common: {names[0]} and {names[1]}")
    rng = np.random.default_rng(seed)
    tail = (1 - confidence) / 2
    changes = []
    for one, other in pairs:
        for metric, key in _RATES.items():
            before, after = one["summary"][key], other["summary"][key]
            interval = _rates(_per_repeat(one, key), _per_repeat(other, key), rng, resamples, tail)
            changes.append(_change(one["name"], metric, before, after, interval, more_is_better=True))
        for latency in _LATENCIES:
            pools = [_pool(side, latency) for side in (one, other)]
            if not all(len(pool.values) for pool in pools):
                continue
            drawn = [_resample(pool, rng, resamples) for pool in pools]
            for index, statistic in enumerate(_STATISTICS):
                before, after = (
                    float(_figures(p, np.ones((1, p.requests), np.int64))[0, index]) for p in pools
                )
                ratios = drawn[1][:, index] / np.maximum(drawn[0][:, index], 1e-12)
                low, high = np.quantile(ratios, (tail, 1 - tail))
                name = f"{latency} {statistic}"
                interval = (float(low), float(high))
                changes.append(_change(one["name"], name, before, after, interval, more_is_better=False))
    return changes


def _change(
    load: str, metric: str, a: float, b: float, interval: tuple[float, float] | None, *, more_is_better: bool
) -> Change:
    low, high = interval or (None, None)
    verdict: Verdict = "" if low is None else "unclear"
    if low is not None and high is not None and not low <= 1 <= high:
        verdict = "better" if (low > 1) == more_is_better else "worse"
    return Change(load, metric, a, b, b / a if a else 0.0, low, high, verdict)


def _per_repeat(result: dict[str, Any], key: str) -> list[float]:
    return [run["report"][key] for run in result["repeats"]]


def _rates(
    a: list[float], b: list[float], rng: np.random.Generator, resamples: int, tail: float
) -> tuple[float, float] | None:
    """A rate is one number a repeat: without several of them nothing says how far it strays."""
    import numpy as np

    if min(len(a), len(b)) < _ENOUGH or not min(a):
        return None
    means = [rng.choice(values, (resamples, len(values))).mean(axis=1) for values in (a, b)]
    low, high = np.quantile(means[1] / means[0], (tail, 1 - tail))
    return float(low), float(high)


def _pool(result: dict[str, Any], latency: str) -> _Pool:
    """Of the requests that were answered."""
    import numpy as np

    values: list[float] = []
    owners: list[int] = []
    starts = [0]
    request = 0
    for run in result["repeats"]:
        for row in run["samples"]:
            if row["error"]:
                continue
            found = _VALUES[latency](row)
            values += found
            owners += [request] * len(found)
            request += 1
        starts.append(request)
    order = np.argsort(values, kind="stable")
    return _Pool(np.asarray(values, np.float64)[order], np.asarray(owners, np.int64)[order], starts)


def _ttft(row: dict[str, Any]) -> list[float]:
    return [] if row["first"] is None else [row["first"] - row["planned"]]


def _tpot(row: dict[str, Any]) -> list[float]:
    tokens = row["output_tokens"]
    return [sum(row["gaps_us"]) / 1e6 / (tokens - 1)] if tokens > 1 and row["first"] is not None else []


_VALUES: dict[str, Callable[[dict[str, Any]], list[float]]] = {
    "ttft": _ttft,
    "tpot": _tpot,
    "itl": lambda row: [gap / 1e6 for gap in row["gaps_us"]],
    "e2e": lambda row: [row["done"] - row["planned"]],
}


def _resample(pool: _Pool, rng: np.random.Generator, resamples: int) -> Floats:
    """The statistics of each resample: [resamples, statistics]."""
    import numpy as np

    firsts, sizes = np.array(pool.starts[:-1]), np.diff(pool.starts)
    firsts, sizes = firsts[sizes > 0], sizes[sizes > 0]
    runs, longest = len(sizes), int(sizes.max())
    at_once = max(1, _AT_ONCE // max(len(pool.values), runs * longest))
    parts = []
    for begin in range(0, resamples, at_once):
        rows = min(at_once, resamples - begin)
        chosen = np.broadcast_to(np.arange(runs), (rows, runs))
        if runs >= _ENOUGH:
            chosen = rng.integers(0, runs, (rows, runs))
        size = sizes[chosen][:, :, None]  # as many requests as the chosen repeat has
        drawn = firsts[chosen][:, :, None] + (rng.random((rows, runs, longest)) * size).astype(np.int64)
        drawn += (np.arange(rows) * pool.requests)[:, None, None]
        counts = np.bincount(drawn[np.arange(longest) < size], minlength=rows * pool.requests)
        parts.append(_figures(pool, counts.reshape(rows, pool.requests)))
    return np.concatenate(parts)


def _figures(pool: _Pool, counts: Counts) -> Floats:
    """Mean and nearest-rank percentiles when request i is drawn ``counts[:, i]`` times: values stay sorted, so a
    percentile is where the running sum of the weights passes it. [rows, statistics]"""
    import numpy as np

    weights = counts[:, pool.owners]
    running = weights.cumsum(axis=1)
    total = np.maximum(running[:, -1], 1)
    found = []
    for share in _STATISTICS.values():
        if share is None:
            found.append(weights @ pool.values / total)
        else:
            found.append(pool.values[(running >= np.ceil(share * total)[:, None]).argmax(axis=1)])
    return np.stack(found, axis=1)


def as_dicts(changes: Sequence[Change]) -> list[dict[str, Any]]:
    return [asdict(change) for change in changes]
