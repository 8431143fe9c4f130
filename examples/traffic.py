"""Constant traffic from the official OpenAI client: ``python examples/traffic.py [MODEL]``.

A line a second says how many requests were answered and how many failed, how long the slowest took, and which model
versions answered. Ctrl-C ends it with the total; the exit code is 1 when a request failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter

from openai import OpenAI

PROMPTS = (
    "Name three colours.",
    "Count from one to ten.",
    "What is the capital of France?",
    "Write a sentence about the sea.",
)


class Traffic:
    """``workers`` threads that each stream one answer after another while the ``with`` block runs."""

    def __init__(self, url: str, key: str, model: str, workers: int = 4, max_tokens: int = 32) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
        self._model = model
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._prompts = itertools.cycle(PROMPTS)
        self._threads = [threading.Thread(target=self._work) for _ in range(workers)]
        self.answered = 0
        self.failures: list[str] = []
        self.versions: Counter[str] = Counter()
        self.slowest_s = 0.0

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def line(self) -> str:
        with self._lock:
            versions = ", ".join(f"{name[:20]} {count}" for name, count in self.versions.items())
            slowest, self.slowest_s = self.slowest_s, 0.0
            return (
                f"{self.answered} answered, {len(self.failures)} failed, "
                f"slowest {slowest:.2f} s; by version: {versions or '-'}"
            )

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._prompts)
            begun = time.perf_counter()
            try:
                version = self._ask(prompt)
            except Exception as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
            else:
                with self._lock:
                    self.answered += 1
                    self.versions[version] += 1
                    self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)

    def _ask(self, prompt: str) -> str:
        raw = self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
        )
        finish = None
        for chunk in raw.parse():
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
        if finish is None:
            raise RuntimeError("the stream was cut")
        return raw.headers.get("x-toque-model-version", "?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="chat")
    parser.add_argument("--url", default=os.environ.get("TOQUE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--key", default="none")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    with Traffic(given.url, given.key, given.model, given.workers) as traffic:
        # A handler rather than KeyboardInterrupt, which is lost where it falls into a destructor or a callback.
        ended = threading.Event()
        signal.signal(signal.SIGINT, lambda number, frame: ended.set())
        while not ended.is_set() and time.monotonic() < end:
            ended.wait(min(1.0, max(0.0, end - time.monotonic())))
            print(traffic.line(), flush=True)
    print(traffic.line())
    for failure in traffic.failures[:5]:
        print(f"  {failure}", file=sys.stderr)
    return 1 if traffic.failures else 0


if __name__ == "__main__":
    sys.exit(main())
