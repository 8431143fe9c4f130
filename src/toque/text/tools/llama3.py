"""``{"name": …, "parameters": {…}}`` without tags, perhaps behind ``<|python_tag|>``: Llama 3.1 and later."""

from __future__ import annotations

from toque.text.tools.base import ParserOptions
from toque.text.tools.json_call import JsonCall
from toque.text.tools.streamed import JsonCallParser

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(JsonCallParser):
    """A brace is the only sign of a call, so an object is one only if it names a function that was offered."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._after_call = False

    def _step(self, last: bool) -> bool:
        if self._call is not None:
            return self._read_call(last)
        if self._after_call:
            # Calls are separated by semicolons.
            rest = self._unread.lstrip(" \t\r\n;,")
            if not rest:
                if last:
                    self._unread = ""
                return False
            if rest[0] != "{" and not _may_begin(rest, PYTHON_TAG):
                self._after_call = False
                return True
            if _may_begin(rest, PYTHON_TAG) and len(rest) < len(PYTHON_TAG) and not last:
                return False
            self._take(len(self._unread) - len(rest))
            self._after_call = False
        found = self._until(("{", PYTHON_TAG), last)
        if found is None:
            return False
        if found == PYTHON_TAG:
            rest = self._unread[len(PYTHON_TAG) :].lstrip()
            if not rest and not last:
                return False
            if rest[:1] != "{":
                self._text(self._take(len(PYTHON_TAG)))
                return bool(self._unread)
            self._prefix = self._take(len(self._unread) - len(rest))
        else:
            self._prefix = ""
        self._call = JsonCall(names=self.options.names, any_key=False)
        return True

    def _called(self) -> None:
        self._after_call = True


def _may_begin(text: str, tag: str) -> bool:
    return text.startswith(tag) or tag.startswith(text)
