"""How many processors this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs in this process's affinity mask, further bounded by its control group's quota (at least one)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, math.ceil(quota)) if quota else count)


def cpu_quota(cgroup: Path) -> float:
    """The control group's limit in CPUs, 0 where there is none (cgroup v2's cpu.max, then v1's files)."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return max(0, micros) / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0.0
