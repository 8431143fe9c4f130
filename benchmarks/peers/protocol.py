"""The language of benchmark workers: one JSON command a line on stdin, one JSON answer a line on stdout.

A worker runs in the environment of its engine and imports nothing of Toque but what it measures. Commands:

    {"op": "prefill", "tokens": 512}                             → {"seconds": …}
    {"op": "decode", "batch": 16, "context": 128, "steps": 32}   → {"seconds": …} for batch x steps tokens
    {"op": "embed", "batch": 16, "context": 128}                 → {"seconds": …} for batch texts
    {"op": "logits", "tokens": [...]}                            → {"path": …} float32 [n, vocab] in a .npy file
    {"op": "generate", "tokens": [...], "n": 64}                 → {"tokens": [...]} greedy
    {"op": "memory"}                                             → {"rss": bytes}

The first line that a worker writes is {"ready": seconds, "version": …}, or {"error": …} when it cannot run the model.
What an engine cannot do is answered by {"error": …} as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ids(count: int, vocab: int, shift: int = 0) -> list[int]:
    """Token ids that are the same for every engine and share no beginning where ``shift`` differs."""
    first, many = (100, min(vocab, 40_200) - 200) if vocab > 400 else (0, vocab)
    return [(i * 7919 + shift * 104729) % many + first for i in range(count)]


def rss() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def answer(peer: Any, command: dict[str, Any]) -> dict[str, Any]:
    op = command.pop("op")
    if op == "memory":
        return {"rss": rss()}
    result = getattr(peer, op)(**command)
    return {{"logits": "path", "generate": "tokens"}.get(op, "seconds"): result}


def serve(make: Callable[..., Any], version: str) -> None:
    """Load what the command line says (path, threads, KV tokens, sequences) and answer until stdin ends."""
    started = time.perf_counter()
    try:
        peer = make(sys.argv[1], *map(int, sys.argv[2:5]))
    except Exception as error:  # whatever an engine raises is its answer
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        return
    print(json.dumps({"ready": time.perf_counter() - started, "version": version}), flush=True)
    for line in sys.stdin:
        try:
            told = answer(peer, json.loads(line))
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(told), flush=True)
