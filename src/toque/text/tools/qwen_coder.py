"""``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``: Qwen 3 Coder.

Values are bare text; the schema of the function says which of them are texts and which are JSON.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from toque.text.tools.base import MAX_CALLS, Parser, ParserOptions, held
from toque.text.tools.json_call import MAX_NAME
from toque.text.tools.parameter_types import ParameterTypes

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END)
_MAX_PARAMETERS = 256
_BLANK = " \t\r\n"
_NAMED = re.compile(rf"<(?:function|parameter)=([^<>\s\"]{{1,{MAX_NAME}}})>")
_NAMED_SO_FAR = re.compile(rf"<(?:function|parameter)=[^<>\s\"]{{0,{MAX_NAME}}}")


class _State(Enum):
    TEXT = auto()
    OPENED = auto()  # behind <tool_call>
    FUNCTION = auto()  # at <function=
    BODY = auto()  # between parameters
    VALUE = auto()
    CLOSING = auto()  # behind </function>


class _Quotes:
    """Whether a value, so far, is the beginning of a JSON list or object and ends inside one of its strings."""

    def __init__(self) -> None:
        self.open = False
        self._begun = self._other = self._escaped = False

    def read(self, text: str) -> None:
        for character in text:
            if self._other:
                return
            if not self._begun:
                self._begun = character not in _BLANK
                self._other = self._begun and character not in "[{"
            elif not self.open:
                self.open = character == '"'
            elif self._escaped:
                self._escaped = False
            elif character < " ":  # no JSON: such are escaped in its strings
                self._other, self.open = True, False
            else:
                self._escaped = character == "\\"
                self.open = character != '"'


class QwenCoderParser(Parser):
    """Texts are shown as they grow, other values when they are whole.

    Missing ``<tool_call>`` tags are forgiven (these models forget the first one), for functions that were offered.
    """

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._state = _State.TEXT
        self._raw = ""  # of the call that is being read: content if it is none
        self._tagged = False
        self._name = ""
        self._types = ParameterTypes({})
        self._keys: set[str] = set()
        self._json = ""  # the arguments so far
        self._index = -1  # of the call, once it is shown
        self._shown = 0  # characters of its arguments that were shown
        self._key = ""
        self._is_text = False  # the parameter being read can be nothing but text
        self._value = ""  # of a parameter that may be something else
        self._quotes = _Quotes()
        self._fresh = False  # no character of the value was read: the line break before it is not part of it

    def _step(self, last: bool) -> bool:
        match self._state:
            case _State.TEXT:
                return self._look(last)
            case _State.OPENED:
                return self._opened(last)
            case _State.FUNCTION:
                return self._function(last)
            case _State.BODY:
                return self._body(last)
            case _State.VALUE:
                return self._read_value(last)
            case _State.CLOSING:
                return self._closing(last)

    def _look(self, last: bool) -> bool:
        found = self._until((OPEN, _FUNCTION), last)
        if found is None:
            return False
        self._raw, self._tagged = "", found == OPEN
        if self._tagged:
            self._raw = self._take(len(OPEN))
        self._state = _State.OPENED if self._tagged else _State.FUNCTION
        return True

    def _opened(self, last: bool) -> bool:
        rest = self._unread.lstrip(_BLANK)
        if rest.startswith(_FUNCTION):
            self._raw += self._take(len(self._unread) - len(rest))
            self._state = _State.FUNCTION
            return True
        if _FUNCTION.startswith(rest) and not last:
            return False
        return self._no_call()

    def _function(self, last: bool) -> bool:
        named = _NAMED.match(self._unread)
        if named is None and not last and _NAMED_SO_FAR.fullmatch(self._unread):
            return False
        if named is None or not (self._tagged or named[1] in self.options.names):
            self._raw += self._take(len(_FUNCTION))
            return self._no_call()
        self._raw += self._take(named.end())
        self._name = named[1]
        self._types = ParameterTypes(self.options.schemas.get(self._name, {}))
        self._keys, self._json = set(), "{"
        self._state = _State.BODY
        return True

    def _body(self, last: bool) -> bool:
        self._grow()
        rest = self._unread.lstrip(_BLANK)
        blanks = len(self._unread) - len(rest)
        if rest.startswith(_FUNCTION_END):
            return self._whole(blanks + len(_FUNCTION_END))
        named = _NAMED.match(rest) if rest.startswith(_PARAMETER) else None
        if named is not None and named[1] not in self._keys and len(self._keys) < _MAX_PARAMETERS:
            self._raw += self._take(blanks + named.end())
            self._begin_value(named[1])
            return True
        waits = rest.startswith(_PARAMETER) and _NAMED_SO_FAR.fullmatch(rest)
        if not last and (waits or _PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest)):
            return False
        return self._no_call()

    def _begin_value(self, key: str) -> None:
        self._json += (", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": "
        self._keys.add(key)
        self._key, self._value, self._fresh = key, "", True
        self._quotes = _Quotes()
        self._is_text = self._types.only_text(key)
        if self._is_text:
            self._json += '"'
        self._state = _State.VALUE

    def _read_value(self, last: bool) -> bool:
        if self._fresh:
            if not self._unread:
                return self._cut() if last else False
            self._fresh = False
            if self._unread[0] == "\n":
                self._raw += self._take(1)
        end = self._unread.find(_PARAMETER_END)
        if end < 0:
            self._add(self._take(len(self._unread) - held(self._unread, _ENDS)))
            self._grow()
            return self._cut() if last else False
        value = self._take(end)
        self._add(value.removesuffix("\n"))
        if self._quotes.open and not value.endswith("\n"):  # these letters are part of the JSON
            self._add(self._take(len(_PARAMETER_END)))
            return True
        self._raw += "\n" * value.endswith("\n") + self._take(len(_PARAMETER_END))
        self._json += '"' if self._is_text else self._types.as_json(self._key, self._value)
        self._state = _State.BODY
        return True

    def _add(self, text: str) -> None:
        self._raw += text
        if self._is_text:
            self._json += json.dumps(text, ensure_ascii=False)[1:-1]
        else:
            self._value += text
            self._quotes.read(text)

    def _whole(self, count: int) -> bool:
        if self._index < 0 and self._calls >= MAX_CALLS:
            return self._no_call()
        self._raw += self._take(count)
        self._json += "}"
        self._show_call()
        self._index = -1
        self._end_call()
        self._state = _State.CLOSING
        return True

    def _closing(self, last: bool) -> bool:
        rest = self._unread.lstrip(_BLANK)
        blanks = len(self._unread) - len(rest)
        if rest.startswith(CLOSE):
            self._take(blanks + len(CLOSE))
            self._state = _State.TEXT
        elif rest.startswith(_FUNCTION):
            self._raw = self._take(blanks)
            self._state = _State.FUNCTION
        elif not last and (CLOSE.startswith(rest) or _FUNCTION.startswith(rest)):
            return False
        else:
            self._state = _State.TEXT
        return bool(self._unread)

    def _grow(self) -> None:
        if self._index >= 0 or (len(self._json) > 1 and len(self._raw) > self.options.hold):
            self._show_call()

    def _show_call(self) -> None:
        if self._index < 0:
            self._index, self._shown = self._begin_call(self._name), 0
        self._arguments(self._index, self._json[self._shown :])
        self._shown = len(self._json)

    def _cut(self) -> bool:
        """The answer ended inside a value. What was shown of the call stays a call, without a begun tag."""
        if self._index >= 0:
            self._json += self._value
            self._unread = ""
            self._show_call()
        return self._no_call()

    def _no_call(self) -> bool:
        """It is malformed, or cut: content, unless it was shown as a call."""
        if self._index < 0:
            self._text(self._raw)
        self._index = -1
        self._state = _State.TEXT
        return bool(self._unread)
