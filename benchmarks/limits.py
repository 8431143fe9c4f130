"""The machine's own limits: DRAM read bandwidth, int8 and (where it has them) bfloat16 multiply-adds.

    python benchmarks/limits.py [--threads 1 2] [--repeats 7]

Compiles limits.c with the system's C compiler. Figures are the best of several passes; neighbours on a shared machine
take from both, so give a kernel's figure as a share of a limit measured in the same minute.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

BUFFER = 256 << 20  # bytes read by all threads together: more than any cache here
PASSES = 4  # over the buffer
ROUNDS = 4_000_000


@functools.cache
def library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "limits.so"
        source = Path(__file__).with_name("limits.c")
        subprocess.run(
            ["cc", "-O2", "-march=native", "-shared", "-fPIC", str(source), "-o", str(out)], check=True
        )
        loaded = ctypes.CDLL(str(out))
    loaded.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for rounds in (loaded.int8_rounds, loaded.bf16_rounds):
        rounds.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    return loaded


@functools.cache
def memory() -> ctypes.Array[ctypes.c_char]:
    """In huge pages, as the engine's weights are: small ones are read a fifth slower."""
    mapped = mmap.mmap(-1, BUFFER + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    ctypes.memset(buffer, 1, BUFFER + 8192)
    return buffer


def best_seconds(work: Callable[[int], object], threads: int, repeats: int) -> float:
    """All threads start together; a pass takes as long as its slowest thread."""
    best = float("inf")
    for _ in range(repeats):
        meet = threading.Barrier(threads + 1)

        def run(index: int, meet: threading.Barrier = meet) -> None:
            meet.wait()
            work(index)

        team = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for thread in team:
            thread.start()
        meet.wait()
        start = time.perf_counter()
        for thread in team:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return best


def measure(threads: int, repeats: int) -> dict[str, float]:
    """Bytes and multiply-adds a second; ``bf16_gmac_s`` is 0 where the machine has no instruction for it."""
    native = library()
    part = BUFFER // threads // 512 * 512
    base = ctypes.addressof(memory())

    def read(thread: int) -> None:
        for _ in range(PASSES):
            native.read_memory(base + thread * part, part)

    seconds = best_seconds(read, threads, repeats)
    found = {"dram_gb_s": PASSES * part * threads / seconds / 1e9}
    sinks = [ctypes.c_int() for _ in range(threads)]
    for name, rounds in (("int8_gmac_s", native.int8_rounds), ("bf16_gmac_s", native.bf16_rounds)):
        per_round = rounds(1, ctypes.byref(sinks[0]))
        found[name] = 0.0
        if per_round:
            seconds = best_seconds(lambda i, f=rounds: f(ROUNDS, ctypes.byref(sinks[i])), threads, repeats)
            found[name] = per_round * ROUNDS * threads / seconds / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {threads: measure(threads, options.repeats) for threads in dict.fromkeys(options.threads)}
    if options.json:
        print(json.dumps(figures))
        return
    for threads, limit in figures.items():
        bf16 = f"{limit['bf16_gmac_s']:.0f} GMAC/s" if limit["bf16_gmac_s"] else "no instruction"
        print(
            f"{threads} threads: DRAM read {limit['dram_gb_s']:.1f} GB/s, int8 {limit['int8_gmac_s']:.0f} GMAC/s, "
            f"bf16 {bf16}"
        )


if __name__ == "__main__":
    main()
