"""A JSON value that arrives character by character."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
_BLANK = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class _Wants(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # just after [
    KEY_OR_END = auto()  # just after {
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()  # a number or a literal: ends before the character that is not part of it
    NOTHING = auto()


class JsonScanner:
    """Strict, but for line breaks and other control characters inside strings, which models write.

    ``step`` takes one character and is False at the first that makes the text no JSON: it is then not consumed, and
    nothing may follow. ``done`` says that an object or array is whole. ``string`` is the raw text of the last string
    or the one being read, without its quotes. ``began`` and ``ended`` tell of the last character that it was the first
    or the last of a value in the outermost object; the end of a number or a word is not told.
    """

    __slots__ = ("_hex", "_key", "_stack", "_wants", "began", "done", "ended", "string", "word")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._wants = _Wants.VALUE
        self._hex = 0
        self._key = False
        self.string = ""
        self.word = ""
        self.began = self.ended = self.done = False

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def in_string(self) -> bool:
        return self._wants in (_Wants.STRING, _Wants.ESCAPE, _Wants.HEX)

    @property
    def key_read(self) -> bool:
        """The last character ended an object's key."""
        return self._wants is _Wants.COLON

    def step(self, character: str) -> bool:
        wants = self._wants
        self.began = self.ended = False
        if wants is _Wants.STRING:
            if character == '"':
                self._wants = _Wants.COLON if self._key else self._after_value()
                self.ended = not self._key and len(self._stack) == 1
            else:
                self.string += character
                if character == "\\":
                    self._wants = _Wants.ESCAPE
            return True
        if wants is _Wants.ESCAPE:
            self.string += character
            self._hex = 4 if character == "u" else 0
            self._wants = _Wants.HEX if self._hex else _Wants.STRING
            return character in '"\\/bfnrtu'
        if wants is _Wants.HEX:
            self.string += character
            self._hex -= 1
            if not self._hex:
                self._wants = _Wants.STRING
            return character in "0123456789abcdefABCDEF"
        if wants is _Wants.WORD:
            if character.isalnum() or character in "+-.":
                self.word += character
                return len(self.word) < 400
            if not _NUMBER.fullmatch(self.word) and self.word not in _LITERALS:
                return False
            wants = self._wants = self._after_value()
        if character in _BLANK:
            return wants is not _Wants.NOTHING
        return self._structure(wants, character)

    def _structure(self, wants: _Wants, character: str) -> bool:
        if wants is _Wants.COLON:
            self._wants = _Wants.VALUE
            return character == ":"
        if wants is _Wants.COMMA_OR_END and character == ",":
            self._wants = _Wants.KEY if self._stack[-1] == "{" else _Wants.VALUE
            return True
        if wants in (_Wants.KEY, _Wants.KEY_OR_END) and character == '"':
            self._begin_string(key=True)
            return True
        if wants in (_Wants.VALUE, _Wants.VALUE_OR_END) and character != "]":
            self.began = len(self._stack) == 1
            if character == '"':
                self._begin_string(key=False)
                return True
            if character in "{[":
                self._stack.append(character)
                self._wants = _Wants.KEY_OR_END if character == "{" else _Wants.VALUE_OR_END
                return len(self._stack) <= MAX_DEPTH
            if character.isascii() and (character.isdigit() or character in "-tfn"):
                self.word = character
                self._wants = _Wants.WORD
                return bool(self._stack)
        ends = {"}": ("{", _Wants.KEY_OR_END), "]": ("[", _Wants.VALUE_OR_END)}.get(character)
        if ends and self._stack and self._stack[-1] == ends[0] and wants in (_Wants.COMMA_OR_END, ends[1]):
            self._stack.pop()
            self.ended = len(self._stack) == 1
            self._wants = self._after_value()
            return True
        return False

    def _begin_string(self, *, key: bool) -> None:
        self._key = key
        self.string = ""
        self._wants = _Wants.STRING

    def _after_value(self) -> _Wants:
        if self._stack:
            return _Wants.COMMA_OR_END
        self.done = True
        return _Wants.NOTHING
