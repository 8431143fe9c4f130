"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many fine-tunes."""

from __future__ import annotations

from enum import Enum, auto

from toque.text.tools.json_call import JsonCall
from toque.text.tools.streamed import JsonCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _State(Enum):
    START = auto()  # nothing but blanks so far
    TEXT = auto()
    OPENED = auto()  # behind the tag, before the brace
    CALL = auto()
    CLOSING = auto()  # behind the call: the closing tag, another call, or neither


class HermesParser(JsonCallParser):
    """A missing closing tag is forgiven; several calls between two tags are several calls.

    Small models leave the tags out altogether: an answer that begins with the JSON of an offered function is a call.
    """

    _state = _State.START
    _bare = False  # the call has no tags

    def _step(self, last: bool) -> bool:
        match self._state:
            case _State.START:
                return self._start(last)
            case _State.TEXT:
                found = self._tag(OPEN, last)
                self._state = _State.OPENED if found else _State.TEXT
                return found
            case _State.OPENED:
                return self._opened(last)
            case _State.CALL:
                return self._read_call(last)
            case _State.CLOSING:
                return self._closing(last)

    def _start(self, last: bool) -> bool:
        rest = self._unread.lstrip(" \t\r\n")
        if not rest and not last:
            return False
        self._state = _State.TEXT
        if rest[:1] == "{" and self.options.names:
            self._prefix = self._take(len(self._unread) - len(rest))
            self._bare = True
            self._begin()
        return True

    def _begin(self) -> None:
        self._call = JsonCall(names=self.options.names, any_key=False) if self._bare else JsonCall()
        self._state = _State.CALL

    def _opened(self, last: bool) -> bool:
        rest = self._unread.lstrip(" \t\r\n")
        self._prefix += self._take(len(self._unread) - len(rest))
        if rest[:1] == "{":
            self._bare = False
            self._begin()
            return True
        if not rest and not last:
            return False
        self._text(self._prefix)
        self._state = _State.TEXT
        return bool(rest)

    def _closing(self, last: bool) -> bool:
        rest = self._unread.lstrip(" \t\r\n")
        if rest.startswith(CLOSE):
            self._take(len(self._unread) - len(rest) + len(CLOSE))
            self._state = _State.TEXT
        elif rest[:1] == "{":
            self._prefix = self._take(len(self._unread) - len(rest))
            self._begin()
        elif CLOSE.startswith(rest) and not last:
            return False
        else:
            self._state = _State.TEXT
        return bool(self._unread)

    def _called(self) -> None:
        self._state = _State.CLOSING

    def _not_called(self) -> None:
        self._state = _State.TEXT
