"""Constant traffic from the official client that knows what it must be answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection

from openai import OpenAI

from .server import Server


class Traffic:
    """``workers`` threads that stream one chat answer after another, without retries of their own.

    Every answer has to be one of ``texts``, to its end. `failures` says what was not; `answers` counts the texts.
    """

    def __init__(
        self, server: Server, texts: Collection[str], workers: int = 3, pause_s: float = 0.0
    ) -> None:
        self._server = server
        self._texts = frozenset(texts)
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._lock = threading.Lock()
        self._busy = 0
        self._threads = [threading.Thread(target=self._work) for _ in range(workers)]
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest_s = 0.0

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._running.set()
        for thread in self._threads:
            thread.join()
        if kind is None:
            assert not self.failures, self.failures[:3]

    @property
    def answered(self) -> int:
        return sum(self.answers.values())

    def more(self, count: int = 10, seconds: float = 60.0) -> None:
        """Until so many more have been answered, well or badly."""
        until = self.answered + len(self.failures) + count
        self._server.until(lambda: self.answered + len(self.failures) >= until, seconds)
        assert not self.failures, self.failures[:3]

    def pause(self) -> None:
        """Nobody asks when this returns."""
        self._running.clear()
        self._server.until(lambda: self._busy == 0, 30)

    def resume(self) -> None:
        self._running.set()

    def _work(self) -> None:
        with OpenAI(
            base_url=f"{self._server.url}/v1", api_key=self._server.key or "none", max_retries=0, timeout=90
        ) as client:
            while not self._stop.is_set():
                with self._lock:
                    self._busy += 1
                if self._running.is_set():
                    self._ask(client)
                with self._lock:
                    self._busy -= 1
                self._running.wait()
                self._stop.wait(self._pause_s)

    def _ask(self, client: OpenAI) -> None:
        begun = time.perf_counter()
        try:
            stream = client.chat.completions.create(
                model=self._server.model,
                messages=[{"role": "user", "content": "hi"}],
                temperature=0,
                stream=True,
            )
            text, finish = "", None
            for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        if finish != "stop" or text not in self._texts:
            self._fail(f"answered {text!r}, ended by {finish}")
            return
        with self._lock:
            self.answers[text] += 1
            self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)

    def _fail(self, what: str) -> None:
        with self._lock:
            self.failures.append(what)
