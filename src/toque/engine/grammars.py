"""Grammars for requests: compiled in threads of their own, so that no stream waits for somebody's schema."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from toque.errors import GrammarError

if TYPE_CHECKING:
    from toque.engine.sequence import Sequence

_THREADS = 2  # one large schema must not hold up everybody else's


class Matcher(Protocol):
    """Where one answer is in its grammar; see `toque.text.grammar.compiler.Matcher`."""

    @property
    def complete(self) -> bool: ...
    @property
    def may_end(self) -> bool: ...
    @property
    def error(self) -> str: ...
    def fill(self, row: npt.NDArray[np.uint32]) -> None: ...
    def accept(self, token: int) -> bool: ...
    def copy(self) -> Matcher: ...


class Grammars:
    """Compiles beside the step loop. ``compile`` is called in threads, and raises for what is no grammar.

    Every sequence given to `prepare` comes out of `prepared` exactly once, whatever became of it meanwhile.
    """

    def __init__(self, compile: Callable[[str], Matcher]) -> None:
        self._compile = compile
        self._pool: ThreadPoolExecutor | None = None
        self._done: deque[tuple[Sequence, Matcher | Exception]] = deque()
        self._arrived = threading.Event()
        self.pending = 0  # given and not yet taken out

    def check(self, grammar: str) -> None:
        """Compile it here and now: GrammarError for what is no grammar. Any thread may call this."""
        self._compile(grammar)

    def prepare(self, sequence: Sequence, grammar: str) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="toque-grammar")
        self.pending += 1
        self._pool.submit(self._work, sequence, grammar)

    def prepared(self) -> list[tuple[Sequence, Matcher | Exception]]:
        """The sequences whose grammar is ready, or was refused."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        self.pending -= len(found)
        return found

    def wait(self, seconds: float) -> None:
        """Until a grammar is done, at most so long."""
        if not self._done:
            self._arrived.wait(seconds)
        self._arrived.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, sequence: Sequence, grammar: str) -> None:
        try:
            matcher = self._compile(grammar)
            _catch_up(matcher, sequence)
            result: Matcher | Exception = matcher
        except Exception as error:
            result = error
        self._done.append((sequence, result))
        self._arrived.set()


def _catch_up(matcher: Matcher, sequence: Sequence) -> None:
    """Through the part of the answer that another engine has generated."""
    for token in sequence.request.generated:
        if not matcher.accept(token):
            raise GrammarError(
                f"the answer so far does not match its grammar: {matcher.error or 'it is over'}"
            )
