"""How much memory this process may really use: the smallest of the host's and of every enclosing cgroup's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number instead of "max"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be used before the kernel kills or swaps; None when the machine does not say.

    Reads MemAvailable and, from this process's cgroup up to the root, limit minus what is used and not reclaimable
    (cgroup v2, and v1's memory controller). ``root`` is the root of the file system, for tests.
    """
    bounds = [
        limit - (_number(folder / usage) or 0) + _reclaimable(folder / "memory.stat")
        for limit, folder, usage in _cgroup_limits(root)
    ]
    host = _host(root, "MemAvailable:")
    if host:
        bounds.append(host)
    return max(min(bounds), 0) if bounds else None


def total_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process and its children may ever use together; None when the machine does not say.

    The smallest of MemTotal and of the limits that `available_bytes` reads.
    """
    bounds = [limit for limit, _, _ in _cgroup_limits(root)]
    host = _host(root, "MemTotal:")
    if host:
        bounds.append(host)
    return min(bounds, default=None)


def _host(root: Path, field: str) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_limits(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Limit in bytes, folder, and the name of the file that says what is used, of every enclosing cgroup that has a
    limit."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's, of which only the root is mounted here.
        while True:
            bound = _number(folder / limit)
            if bound is not None and bound < _UNLIMITED:
                yield bound, folder, usage
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel drops before it runs out; it counts as used in the cgroup's own number."""
    found = 0
    for line in _lines(stat):
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):  # v1 has both; the total counts child groups too
            found = max(found, int(value))
    return found


def _number(path: Path) -> int | None:
    for line in _lines(path):
        return None if line == "max" else int(line)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
