"""One call written as JSON: ``{"name": …, "arguments": {…}}``, or its arguments alone."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from toque.text.tools.json_scanner import JsonScanner

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
MAX_NAME = 256


class Reading(Enum):
    GOING_ON = auto()
    WHOLE = auto()
    MALFORMED = auto()  # the last character was not taken


class JsonCall:
    """Feed characters to `step`. ``name`` is None until it is known; ``arguments`` grows as text that is valid JSON so
    far, with control characters inside strings written as escapes. ``raw`` is everything that was taken.

    ``name`` given: what is read are the arguments alone. ``names``: others are malformed. ``any_key`` allows keys
    besides those of a call; without it the first foreign key ends the matter.
    """

    def __init__(self, *, name: str | None = None, names: Collection[str] = (), any_key: bool = True) -> None:
        self.name = name
        self.raw = ""
        self.arguments = ""
        self._names = names
        self._any_key = any_key
        self._scanner = JsonScanner()
        self._key = ""
        self._bare = name is not None
        self._capturing = self._bare
        self._as_string = False  # the arguments are JSON text inside a string

    @property
    def showable(self) -> bool:
        """The arguments may be shown before the call is whole."""
        return self.name is not None and not self._as_string and bool(self.arguments)

    def step(self, character: str) -> Reading:
        scanner = self._scanner
        in_string = scanner.in_string
        if (not self.raw and character != "{") or not scanner.step(character):
            return Reading.MALFORMED
        if not self._bare and not self._member(character, in_string):
            return Reading.MALFORMED
        self.raw += character
        if self._capturing:
            self._capture(character, in_string)
            self._capturing = self._bare or not scanner.ended
        if not scanner.done:
            return Reading.GOING_ON
        if self._finish():
            return Reading.WHOLE
        self.raw = self.raw[:-1]
        return Reading.MALFORMED

    def _member(self, character: str, in_string: bool) -> bool:
        """What the character means for the call's own members; False when it cannot be one."""
        scanner = self._scanner
        if in_string and scanner.key_read and scanner.depth == 1:
            self._key = _plain(scanner.string) or "?"
            return self._any_key or self._key in _KEYS
        if scanner.began:
            if self._key in _ARGUMENTS:
                if self.arguments or character not in '{"':
                    return False
                self._capturing = True
                self._as_string = character == '"'
            elif self._key == "name":
                return character == '"' and self.name is None
        elif scanner.ended and not self._capturing and self._key == "name":
            name = _plain(scanner.string)
            if not name or len(name) > MAX_NAME or (self._names and name not in self._names):
                return False
            self.name = name
        return True

    def _capture(self, character: str, in_string: bool) -> None:
        if in_string and character < " ":
            character = _ESCAPES.get(character) or f"\\u{ord(character):04x}"
        self.arguments += character

    def _finish(self) -> bool:
        if self.name is None:
            return False
        if not self.arguments:
            self.arguments = "{}"
        elif self._as_string:
            inner = _plain(self.arguments[1:-1])
            if inner is None or not _is_object(inner):
                return False
            self.arguments = inner if inner.strip() else "{}"
        return True


def _plain(raw: str) -> str | None:
    """A raw JSON string as text; None when that is no Unicode (a lone surrogate)."""
    try:
        text: str = json.loads(f'"{raw}"', strict=False)
        text.encode()
    except ValueError:
        return None
    return text


def _is_object(text: str) -> bool:
    try:
        return not text.strip() or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
