"""What every tool-call parser promises, and the parts they share."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_CALLS = 128  # in one answer; what follows is content
# A call that is not certain to be one is shown once this many characters of arguments have come: until then it can
# still turn out to be malformed, and become content whole.
HOLD = 256
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Content: text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of call ``index``. The first has ``id`` and ``name`` and no arguments, later ones arguments only."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = TextDelta | ToolDelta


class ToolParser(Protocol):
    """Text in, content and calls out.

    Guarantees: however the text is cut into pieces, the fold of the deltas is the same; no character is lost (the
    tags and the JSON around a well-formed call excepted, blanks before or after it, and all that is no call where only
    calls are allowed); a call that is malformed before its arguments are shown is content; one that is cut or broken
    later keeps what came of its arguments, and is not counted in ``completed``. Nothing raises.
    """

    completed: int  # calls that are whole
    done: bool  # nothing that follows would be shown: the answer may be ended

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """No more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """``names``: the functions that were offered; an empty set means any. ``hold``: see `HOLD`; 0 where a grammar
    makes sure that calls are well-formed. ``parallel`` False ends the answer after its first call. ``schemas``: of the
    functions' parameters, by name; only dialects that write values as bare text need them. ``only_calls`` where a
    grammar allows nothing but calls: the rest is then a piece of a tag, or of a call that was cut, and not shown."""

    names: Collection[str] = ()
    parallel: bool = True
    hold: int = HOLD
    new_id: Callable[[], str] | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    only_calls: bool = False


def call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def short_call_id() -> str:
    """Mistral's templates take ids of exactly nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class Parser(ABC):
    """The loop of a parser: unread text, deltas to give out, blanks that are held back because a call may follow."""

    blanks = " \t\r\n"

    def __init__(self, options: ParserOptions) -> None:
        self.options = options
        self.completed = 0
        self.done = False
        self._calls = 0  # given an index
        self._unread = ""
        self._blank = ""  # held back: lost if a call follows
        self._out: list[Delta] = []
        self._new_id = options.new_id or call_id

    def push(self, text: str) -> list[Delta]:
        self._unread = "" if self.done else self._unread + text
        while self._unread and not self.done and self._step(False):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        while not self.done and self._step(True):
            pass
        if not self.done and not self._calls:
            self._show(self._blank)
        self._blank = self._unread = ""
        return self._taken()

    @abstractmethod
    def _step(self, last: bool) -> bool:
        """Read some of the unread text; False when more is needed. ``last``: no more will come, so read all of it."""

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _take(self, count: int) -> str:
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    def _text(self, text: str) -> None:
        """Content, its trailing blanks held back."""
        whole = self._blank + text
        shown = whole.rstrip(self.blanks)
        self._blank = whole[len(shown) :]
        self._show(shown)

    def _show(self, text: str) -> None:
        if not text or self.options.only_calls:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, TextDelta):
            self._out[-1] = TextDelta(last.text + text)
        else:
            self._out.append(TextDelta(text))

    def _begin_call(self, name: str) -> int:
        index = self._calls
        self._calls += 1
        self._blank = ""
        self._out.append(ToolDelta(index, self._new_id(), name, ""))
        return index

    def _arguments(self, index: int, text: str) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, ToolDelta) and last.index == index and last.name is None:
            self._out[-1] = ToolDelta(index, None, None, last.arguments + text)
        else:
            self._out.append(ToolDelta(index, None, None, text))

    def _end_call(self) -> None:
        self.completed += 1
        if not self.options.parallel:
            self.done = True

    def _whole_call(self, name: str, arguments: str) -> None:
        self._arguments(self._begin_call(name), arguments)
        self._end_call()

    def _until(self, tags: tuple[str, ...], last: bool) -> str | None:
        """Show text up to the first of the tags, and return that (still unread); None when there is none yet."""
        found = [(place, tag) for tag in tags if (place := self._unread.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            self._text(self._take(place))
            return tag
        self._text(self._take(len(self._unread) - (0 if last else held(self._unread, tags))))
        return None


def held(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a tag."""
    longest = max(len(tag) for tag in tags) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0
