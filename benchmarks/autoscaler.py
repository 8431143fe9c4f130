"""A day of bursty traffic through the autoscaler: ``python benchmarks/autoscaler.py [--seeds 3]``.

Prints the table of docs/operations.md: replica-hours, how long requests waited for their turn, how many replicas were
started. Speeds are those of SmolLM2-135M on one Zen 3 core; each simulated replica has a machine of its own.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from toque.fleet.simulate import Arrival, Figures, Simulation, Speed, bursty_day
from toque.fleet.spec import ScalingPolicy

CASES: tuple[tuple[str, ScalingPolicy, Speed, int], ...] = (
    ("0..8, start 0.6 s", ScalingPolicy(min_replicas=0, max_replicas=8), Speed(), 0),
    ("0..8, start 30 s", ScalingPolicy(min_replicas=0, max_replicas=8), Speed(start_s=30.0), 0),
    ("1..8, start 30 s", ScalingPolicy(min_replicas=1, max_replicas=8), Speed(start_s=30.0), 0),
    *((f"{count} fixed", ScalingPolicy(), Speed(), count) for count in (3, 4, 5)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="days to take the medians of")
    seeds = parser.parse_args().seeds
    days = [bursty_day(seed) for seed in range(1, seeds + 1)]
    print(f"{median(len(day) for day in days):.0f} requests a day\n")
    print("| replicas | replica-hours | waited p95 | p99 | most | a token, p95 | starts | wakes |")
    print("|---|---|---|---|---|---|---|---|")
    spent = []
    for name, policy, speed, fixed in CASES:
        begun = time.process_time()
        found = [_day(day, policy, speed, fixed) for day in days]
        if not fixed:
            spent.append((time.process_time() - begun) / len(days))
        print(
            f"| {name} | {median(f.replica_hours for f in found):.0f} | "
            + " | ".join(f"{median(f.queue(q) for f in found):.1f} s" for q in (0.95, 0.99, 1.0))
            + f" | {median(f.token(0.95) for f in found) * 1e3:.0f} ms"
            + f" | {median(f.starts for f in found):.0f} | {median(f.wakes for f in found):.0f} |"
        )
    print(f"\na day in {median(spent):.1f} s of CPU time")


def _day(day: list[Arrival], policy: ScalingPolicy, speed: Speed, fixed: int) -> Figures:
    return Simulation(day, policy, speed, fixed=fixed).run()


if __name__ == "__main__":
    main()
