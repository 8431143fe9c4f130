"""``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, and the later ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

import re
from enum import Enum, auto

from toque.text.tools.base import ParserOptions, short_call_id
from toque.text.tools.json_call import JsonCall
from toque.text.tools.streamed import JsonCallParser

TAG = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"([A-Za-z0-9_.\-]{1,200})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?[ \t\r\n]{0,8}(?=\{)"
)
_NAMED_SO_FAR = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,300}[ \t\r\n]{0,8}")
_BLANK = " \t\r\n"


class _State(Enum):
    TEXT = auto()
    OPENED = auto()  # behind the tag
    CALL = auto()
    BETWEEN = auto()  # behind a call of a list


class MistralParser(JsonCallParser):
    """Ids are nine letters and digits, as the templates of these models demand."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._new_id = options.new_id or short_call_id
        self._state = _State.TEXT
        self._in_list = False

    def _step(self, last: bool) -> bool:
        match self._state:
            case _State.TEXT:
                found = self._tag(TAG, last)
                self._state = _State.OPENED if found else _State.TEXT
                return found
            case _State.OPENED:
                return self._opened(last)
            case _State.CALL:
                return self._read_call(last)
            case _State.BETWEEN:
                return self._between(last)

    def _opened(self, last: bool) -> bool:
        rest = self._unread.lstrip(_BLANK)
        blanks = len(self._unread) - len(rest)
        if rest.startswith("["):
            inner = rest[1:].lstrip(_BLANK)
            if inner.startswith("{"):
                self._prefix += self._take(len(self._unread) - len(inner))
                return self._begin(JsonCall(), in_list=True)
            waiting = not inner
        elif rest.startswith("{"):
            self._prefix += self._take(blanks)
            return self._begin(JsonCall(), in_list=False)
        else:
            named = _NAMED.match(rest)
            if named:
                self._prefix += self._take(blanks + named.end())
                return self._begin(JsonCall(name=named[1]), in_list=False)
            waiting = not rest or _NAMED_SO_FAR.fullmatch(rest) is not None
        if waiting and not last:
            return False
        self._text(self._prefix)
        self._state = _State.TEXT
        return bool(self._unread)

    def _begin(self, call: JsonCall, *, in_list: bool) -> bool:
        self._call, self._in_list = call, in_list
        self._state = _State.CALL
        return True

    def _between(self, last: bool) -> bool:
        rest = self._unread.lstrip(_BLANK)
        if rest.startswith("]"):
            self._take(len(self._unread) - len(rest) + 1)
            self._state = _State.TEXT
        elif rest.startswith(","):
            inner = rest[1:].lstrip(_BLANK)
            if not inner and not last:
                return False
            if inner.startswith("{"):
                self._prefix = self._take(len(self._unread) - len(inner))
                return self._begin(JsonCall(), in_list=True)
            self._state = _State.TEXT
        elif not rest and not last:
            return False
        else:
            self._state = _State.TEXT
        return bool(self._unread)

    def _called(self) -> None:
        self._state = _State.BETWEEN if self._in_list else _State.TEXT

    def _not_called(self) -> None:
        self._state = _State.TEXT
