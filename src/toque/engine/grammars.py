"""Grammars for requests: compiled in threads of their own, so that no stream waits for somebody's schema.

The step's threads take every core there is, and a step ends with the slowest of them: a compiler that gets half a core
makes steps twice as long. One that has not finished after 20 ms of CPU therefore goes on with the small share that the
system gives a thread of low priority, a tenth of a core that is wanted. Ordinary schemas take less.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from toque.errors import GrammarError, ToqueError

if TYPE_CHECKING:
    from toque.engine.sequence import Sequence

_THREADS = 2  # one large schema must not hold up everybody else's
_SLOWED = 2  # nor two very large ones: so many more that have been slowed down
_CPU_S = 0.02  # at ordinary priority
_NICE = 10


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

    Every sequence given to `prepare` comes out of `prepared` exactly once, whatever became of it meanwhile. What
    takes long is slowed down by `prepared`, that is by the step loop, while it has something else to do.
    """

    def __init__(self, compile: Callable[[str], Matcher], warm: Callable[[], None] = lambda: None) -> None:
        """``warm`` does what the first `compile` would have to do before anything else."""
        self._compile = compile
        self._warm = warm
        self._closed = False
        self._asked: deque[tuple[Sequence, str]] = deque()
        self._threads: list[_Compiling] = []
        self._done: deque[tuple[Sequence, Matcher | Exception]] = deque()
        self._arrived = threading.Event()
        self.pending = 0  # given and not yet taken out

    def warm(self) -> threading.Thread:
        """Prepares for the first grammar, in a thread that is returned."""
        thread = threading.Thread(target=self._prepare_first, name="toque-grammar")
        thread.start()
        return thread

    def check(self, grammar: str) -> None:
        """Compile it here and now: GrammarError for what is no grammar. Any thread may call this."""
        self._compile(grammar)

    def prepare(self, sequence: Sequence, grammar: str) -> None:
        self.pending += 1
        self._asked.append((sequence, grammar))
        self._hire()

    def prepared(self) -> list[tuple[Sequence, Matcher | Exception]]:
        """The sequences whose grammar is ready, or was refused."""
        for thread in self._threads:
            thread.slow_down(_CPU_S)
        self._hire()
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
        self._closed = True
        self._asked.clear()

    def _prepare_first(self) -> None:
        # A model without a usable tokenizer still serves token ids; a request with a grammar will say what is wrong.
        with suppress(ToqueError):
            if not self._closed:
                self._warm()

    def _hire(self) -> None:
        """One thread more, where something waits and there may be one."""
        if not self._asked:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        slowed = min(_SLOWED, sum(thread.slowed for thread in self._threads))
        if len(self._threads) - slowed < _THREADS:
            self._threads.append(_Compiling(self._asked, self._work))
            self._threads[-1].start()

    def _work(self, sequence: Sequence, grammar: str) -> None:
        try:
            matcher = self._compile(grammar)
            _catch_up(matcher, sequence)
            result: Matcher | Exception = matcher
        except Exception as error:
            result = error
        self._done.append((sequence, result))
        self._arrived.set()


class _Compiling(threading.Thread):
    """Compiles until nothing is asked for. One that was slowed down ends before that: none is made faster again."""

    def __init__(self, asked: deque[tuple[Sequence, str]], work: Callable[[Sequence, str], None]) -> None:
        super().__init__(name="toque-grammar")
        self._asked = asked
        self._work = work
        self._lock = threading.Lock()
        self._clock = 0  # of this thread's CPU time
        self._began: float | None = None  # by that clock, with the grammar at hand
        self.slowed = False

    def run(self) -> None:
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self.slowed:
            try:
                job = self._asked.popleft()
            except IndexError:
                return
            with self._lock:
                self._began = time.thread_time()
            self._work(*job)
            with self._lock:
                self._began = None

    def slow_down(self, after_s: float) -> None:
        """If the grammar at hand has taken so much CPU time, and the system can tell."""
        with self._lock, suppress(OSError):  # it does not end meanwhile; a sandbox may forbid both calls
            if self.slowed or self._began is None or not self._clock:
                return
            if time.clock_gettime(self._clock) - self._began > after_s:
                self.slowed = True
                thread = self.native_id or 0
                # Never more urgent than it was: the whole process may have been started at a lower priority.
                lower = max(_NICE, os.getpriority(os.PRIO_PROCESS, thread))
                os.setpriority(os.PRIO_PROCESS, thread, lower)


def _catch_up(matcher: Matcher, sequence: Sequence) -> None:
    """Through the part of the answer that another engine has generated."""
    for token in sequence.request.generated:
        if not matcher.accept(token):
            raise GrammarError(
                f"the answer so far does not match its grammar: {matcher.error or 'it is over'}"
            )
