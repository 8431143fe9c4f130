"""``[f(a=1), g(b="x")]``: Llama 3.2 and 4, and others that call functions in Python."""

from __future__ import annotations

import re

from toque.text.tools.base import MAX_CALLS, Parser, ParserOptions
from toque.text.tools.python_call import PythonScanner, read_calls

_TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
_HEAD = re.compile(r"\[[ \t\r\n]{0,8}([A-Za-z_][A-Za-z0-9_.]{0,200})[ \t\r\n]{0,8}\(")
_HEAD_SO_FAR = re.compile(r"\[[ \t\r\n]{0,8}([A-Za-z_][A-Za-z0-9_.]{0,200}[ \t\r\n]{0,8})?")


class PythonicParser(Parser):
    """A list counts as calls only when it begins with a function that was offered; its calls are shown together."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._scanner: PythonScanner | None = None
        self._raw = ""

    def _step(self, last: bool) -> bool:
        if self._scanner is not None:
            return self._read(self._scanner, last)
        found = self._until(("[", *_TAGS), last)
        if found is None:
            return False
        if found != "[":
            self._take(len(found))
            return bool(self._unread)
        head = _HEAD.match(self._unread)
        if head and (not self.options.names or head[1] in self.options.names):
            self._scanner, self._raw = PythonScanner(), ""
            return True
        if head is None and not last and _HEAD_SO_FAR.fullmatch(self._unread):
            return False
        self._text(self._take(1))
        return bool(self._unread)

    def _read(self, scanner: PythonScanner, last: bool) -> bool:
        for place, character in enumerate(self._unread):
            if not scanner.step(character):
                return self._none(self._take(place))
            if scanner.done:
                taken = self._take(place + 1)
                calls = read_calls(self._raw + taken)
                if calls is None or self._calls + len(calls) > MAX_CALLS:
                    return self._none(taken)
                self._scanner = None
                for name, arguments in calls:
                    if not self.done:
                        self._whole_call(name, arguments)
                return bool(self._unread)
        taken = self._take(len(self._unread))
        if last:
            return self._none(taken)
        self._raw += taken
        return False

    def _none(self, taken: str) -> bool:
        """No calls after all: what was read is content."""
        self._scanner = None
        self._text(self._raw + taken)
        return bool(self._unread)
