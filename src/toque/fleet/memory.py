"""What a replica takes of a machine's memory, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROCESS_MB = 128  # the interpreter, numpy, the native core, buffers of a step
CACHE_MB = (
    256  # what a KV cache without a bound of its own is counted as: its pages are committed as they are used
)
_PACKED = 1.1  # weights as they are packed, over the file's size


def estimate_mb(path: Path, engine: Mapping[str, object]) -> int:
    """MiB of one replica of the model at ``path`` (a file, or a folder of them) with these engine options.

    A deployment that knows better says so in ``resources.memory_mb``. 0-byte or missing files count as nothing: the
    replica will say what is wrong with them.
    """
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        size = sum(file.stat().st_size for file in files)
    except OSError:
        size = 0
    bound = engine.get("kv_memory_mb")
    cache = bound if isinstance(bound, int) and bound > 0 else CACHE_MB
    return PROCESS_MB + cache + int(size * _PACKED / 2**20)
