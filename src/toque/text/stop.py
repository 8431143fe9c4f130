"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toque.errors import RequestError

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters; also bounds how much text is ever held back


def parse_stop(value: object) -> tuple[str, ...]:
    """What a caller gave as ``stop``: None, a string, or a list of strings. Anything else raises RequestError."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        raise RequestError(
            f"stop must be a string or a list of strings, got {type(value).__name__}", param="stop"
        )
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    checked = []
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop must hold strings only, got {type(stop).__name__}", param="stop")
        if not stop:
            raise RequestError(
                "stop must not hold an empty string: it would end every answer at once", param="stop"
            )
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string has at most {MAX_STOP_LENGTH} characters, got {len(stop)}", param="stop"
            )
        checked.append(stop)
    return tuple(checked)


class StopScanner:
    """Finds the first stop string of a stream; holds back only what may still become one.

    The stop that is complete first wins, the longest of those that end together: so the result does not depend on how
    the text was cut into pieces. Each character is looked at once (Knuth-Morris-Pratt, one state per stop).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop must not hold an empty string", param="stop")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._idle = True  # no stop has begun
        self._begins = (
            re.compile("[" + "".join(re.escape(stop[0]) for stop in self._stops) + "]") if stops else None
        )
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show. Once ``matched`` is set, everything after the stop is dropped."""
        if self.matched is not None:
            return ""
        if self._begins is None:
            return text
        start = 0
        if self._idle:
            found = self._begins.search(text)
            if found is None:
                return text
            start = found.start()
        stops, tables, states = self._stops, self._tables, self._states
        for position in range(start, len(text)):
            character = text[position]
            for index, stop in enumerate(stops):
                state = states[index]
                while state and stop[state] != character:
                    state = tables[index][state - 1]
                if stop[state] == character:
                    state += 1
                    if state == len(stop):
                        return self._match(stop, text[: position + 1])
                states[index] = state
        whole = self._held + text
        hold = max(states)
        self._idle = hold == 0
        self._held = whole[len(whole) - hold :]
        return whole[: len(whole) - hold]

    def finish(self) -> str:
        """What was held back and turned out to be no stop."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        self._idle = True
        return held

    def _match(self, stop: str, text: str) -> str:
        self.matched = stop
        whole = self._held + text
        self._held = ""
        return whole if self._include else whole[: len(whole) - len(stop)]


def _failures(stop: str) -> list[int]:
    """For each prefix of the stop, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
