"""Typed reads of a parsed JSON object, each failing with the key's full name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toque.errors import FormatError

FILE = "config.json"


class Fields:
    """Typed reads of a JSON object; ``null`` counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str = FILE) -> None:
        self._values = values
        self._where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def null(self, key: str) -> bool:
        """Stated, as ``null``: switched off, where an absent key would have its class's default."""
        return key in self._values and self._values[key] is None

    def empty(self, key: str) -> bool:
        """Absent, ``null``, or a list without entries."""
        return self._values.get(key) in (None, [])

    def true_keys(self) -> list[str]:
        return [key for key, value in self._values.items() if value is True]

    def _get(self, key: str, default: Any, wanted: Callable[[Any], bool], what: str) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise FormatError("is missing", field=f"{self._where}.{key}")
            return default
        if not wanted(value):
            raise FormatError(f"must be {what}, got {shown(value)}", field=f"{self._where}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, _is_integer, "a non-negative integer"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, _is_number, "a finite number"))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return bool(self._get(key, default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default, lambda value: isinstance(value, str), "a string"))

    def strings(self, key: str) -> list[str] | None:
        if key not in self:
            return None
        value = self._get(key, None, _is_strings, "a list of strings")
        return list(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None, _is_numbers, "a list of finite numbers")
        return tuple(float(item) for item in value)

    def integers(self, key: str) -> list[int]:
        value = self._get(key, None, _is_integers, "a list of non-negative integers")
        return list(value)

    def group_size(self, key: str) -> int:
        """Columns that share a scale; 0 for all of them, which files write as -1."""
        value = self._get(key, None, lambda found: found == -1 or _is_integer(found), "an integer")
        if value == 0 or value > 1 << 20:
            raise FormatError(f"must be -1 or between 1 and {1 << 20}, got {value}", field=self.field(key))
        return max(int(value), 0)

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def object(self, key: str) -> Fields | None:
        if key not in self:
            return None
        value = self._get(key, None, lambda found: isinstance(found, dict), "an object")
        return Fields(value, f"{self._where}.{key}")

    def field(self, key: str) -> str:
        return f"{self._where}.{key}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # also refuses NaN, infinities and integers too long for a float


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 4096 and all(_is_number(item) for item in value)


def _is_integers(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 4096 and all(_is_integer(item) for item in value)


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 4096 and all(isinstance(item, str) for item in value)


def shown(value: object) -> str:
    if isinstance(value, list | dict):
        return type(value).__name__
    text = ascii(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."
