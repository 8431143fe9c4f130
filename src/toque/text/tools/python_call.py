"""Calls written in Python: ``f(a=1, b=["x"])``, with literals as arguments."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

MAX_SOURCE = 100_000  # characters
_MAX_DEPTH = 32
_CLOSES = {")": "(", "]": "[", "}": "{"}
_WORDS = {"true": True, "false": False, "null": None}


class PythonScanner:
    """Finds where an expression's brackets close. ``step`` is False at a character that cannot be part of it."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False
        self._length = 0
        self.done = False

    def step(self, character: str) -> bool:
        self._length += 1
        if self._length > MAX_SOURCE:
            return False
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            return True
        if character in "\"'":
            self._quote = character
        elif character in "([{":
            self._open.append(character)
            return len(self._open) <= _MAX_DEPTH
        elif character in _CLOSES:
            if not self._open or self._open.pop() != _CLOSES[character]:
                return False
            self.done = not self._open
        return character != "#"


def read_calls(source: str) -> list[tuple[str, str]] | None:
    """Names and JSON arguments of ``f(…)``, of a list of such calls, or of one a line; None for anything else.

    Nothing is evaluated. ``print(f(…))`` is the call inside, which is how Gemma is taught to ask for a result.
    """
    if len(source) > MAX_SOURCE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            body = ast.parse(source.strip()).body
        found: list[ast.expr] = []
        for statement in body:
            if not isinstance(statement, ast.Assign | ast.Expr):
                return None
            value = statement.value
            found += value.elts if isinstance(value, ast.List) else [value]
        return [_call(expression) for expression in found] or None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _call(expression: ast.expr) -> tuple[str, str]:
    if not isinstance(expression, ast.Call):
        raise ValueError("no call")
    name = _dotted(expression.func)
    if name == "print" and len(expression.args) == 1 and not expression.keywords:
        return _call(expression.args[0])
    if expression.args:
        raise ValueError("arguments without names")
    arguments = {}
    for keyword in expression.keywords:
        if keyword.arg is None:
            raise ValueError("unpacking")
        arguments[keyword.arg] = _literal(keyword.value, 0)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return name, text


def _dotted(expression: ast.expr) -> str:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return f"{_dotted(expression.value)}.{expression.attr}"
    raise ValueError("no name")


def _literal(expression: ast.expr, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    match expression:
        case ast.Constant(value) if value is None or isinstance(value, str | bool | int | float):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) in (int, float):
            return -value  # type: ignore[operator]
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _literal(value, depth + 1) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(expression: ast.expr | None) -> str:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value
    raise ValueError("no text as key")
