"""What this process takes of its machine."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from toque.types import EngineStats

_PAGE = os.sysconf("SC_PAGE_SIZE")


def with_process(stats: EngineStats) -> EngineStats:
    """The stats with what the process has used beside them: CPU time of all threads, resident memory."""
    return replace(stats, cpu_seconds=time.process_time(), memory_bytes=resident_bytes())


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # no Linux: the most it ever was
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
