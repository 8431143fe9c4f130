"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many fine-tunes."""

from __future__ import annotations

from enum import Enum, auto

from toque.text.tools.json_call import JsonCall
from toque.text.tools.streamed import JsonCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _State(Enum):
    TEXT = auto()
    OPENED = auto()  # behind the tag, before the brace
    CALL = auto()
    CLOSING = auto()  # behind the call: the closing tag, another call, or neither


class HermesParser(JsonCallParser):
    """A missing closing tag is forgiven; several calls between two tags are several calls."""

    _state = _State.TEXT

    def _step(self, last: bool) -> bool:
        match self._state:
            case _State.TEXT:
                if self._until((OPEN,), last) is None:
                    return False
                self._prefix = self._take(len(OPEN))
                self._state = _State.OPENED
                return True
            case _State.OPENED:
                return self._opened(last)
            case _State.CALL:
                return self._read_call(last)
            case _State.CLOSING:
                return self._closing(last)

    def _opened(self, last: bool) -> bool:
        rest = self._unread.lstrip(" \t\r\n")
        self._prefix += self._take(len(self._unread) - len(rest))
        if rest[:1] == "{":
            self._call = JsonCall()
            self._state = _State.CALL
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
            self._call = JsonCall()
            self._state = _State.CALL
        elif CLOSE.startswith(rest) and not last:
            return False
        else:
            self._state = _State.TEXT
        return bool(self._unread)

    def _called(self) -> None:
        self._state = _State.CLOSING

    def _not_called(self) -> None:
        self._state = _State.TEXT
