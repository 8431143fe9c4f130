"""A fenced block of Python, marked ``tool_code``: Gemma."""

from __future__ import annotations

from toque.text.tools.base import MAX_CALLS, Parser, ParserOptions
from toque.text.tools.python_call import read_calls

OPEN, CLOSE = "```tool_code", "```"


class GemmaParser(Parser):
    """The block is read when it is whole; the end of the answer closes it too."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._inside = False
        self._raw = ""

    def _step(self, last: bool) -> bool:
        if not self._inside:
            if self._until((OPEN,), last) is None:
                return False
            self._take(len(OPEN))
            self._inside, self._raw = True, ""
            return True
        end = self._unread.find(CLOSE)
        if end >= 0:
            body = self._raw + self._take(end)
            self._take(len(CLOSE))
            self._block(body, CLOSE)
            return bool(self._unread)
        keep = 0 if last else min(len(self._unread), len(CLOSE) - 1)
        self._raw += self._take(len(self._unread) - keep)
        if last:
            self._block(self._raw, "")
        return False

    def _block(self, body: str, close: str) -> None:
        self._inside = False
        calls = read_calls(body)
        if calls is None or self._calls + len(calls) > MAX_CALLS:
            self._text(OPEN + body + close)
            return
        for name, arguments in calls:
            if not self.done:
                self._whole_call(name, arguments)
