"""Reading one JSON call inside a parser: shown as it grows, or given back as text when it is none."""

from __future__ import annotations

from toque.text.tools.base import MAX_CALLS, Parser
from toque.text.tools.json_call import JsonCall, Reading


class JsonCallParser(Parser):
    """A parser whose calls are JSON. Subclasses set ``_call`` when one begins, and ``_prefix`` to what came before it.

    ``_read_call`` then reads it; when it is whole ``_called`` is run, when it is malformed ``_not_called``, with the
    call's text given to the content.
    """

    _call: JsonCall | None = None
    _prefix = ""  # the tags before it: content if it is no call
    _index = -1  # of the call, once it is shown
    _shown = 0  # characters of its arguments that were shown

    def _tag(self, tag: str, last: bool) -> bool:
        """Show the text up to the tag that calls begin with, and take that as their prefix; False when none came."""
        if self._until((tag,), last) is None:
            return False
        self._prefix = self._take(len(tag))
        return True

    def _read_call(self, last: bool) -> bool:
        call = self._call
        assert call is not None
        for place, character in enumerate(self._unread):
            reading = call.step(character)
            if reading is Reading.GOING_ON:
                if self._index >= 0 or (call.showable and len(call.raw) > self.options.hold):
                    self._show_call(call)
                continue
            self._take(place + (reading is Reading.WHOLE))
            self._call = None
            if reading is Reading.WHOLE and self._calls < MAX_CALLS + (self._index >= 0):
                self._show_call(call)
                self._index = -1
                self._end_call()
                self._called()
            else:
                self._give_back(call)
            return True
        self._unread = ""
        if not last:
            return False
        self._call = None
        self._give_back(call)
        return False

    def _show_call(self, call: JsonCall) -> None:
        if self._index < 0:
            assert call.name is not None
            self._index, self._shown = self._begin_call(call.name), 0
        self._arguments(self._index, call.arguments[self._shown :])
        self._shown = len(call.arguments)

    def _give_back(self, call: JsonCall) -> None:
        """It is malformed, or cut. What was shown of it stays; what was not is content."""
        if self._index < 0:
            self._text(self._prefix + call.raw)
            self._not_called()
        else:
            self._index = -1
            self._broken()

    def _called(self) -> None: ...

    def _not_called(self) -> None: ...

    def _broken(self) -> None:
        """A call that was shown already turned out malformed; what follows is content."""
        self._not_called()
