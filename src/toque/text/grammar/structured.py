"""The forms that a caller can ask for by name: the HTTP field ``structured_outputs``, and the library's argument."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from toque.errors import RequestError
from toque.text.grammar.spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must look like; exactly one is given.

    ``json`` is a JSON schema: as data, as text, or a class that can tell its own (`model_json_schema`, as pydantic's
    models do). ``json_object`` is any JSON object, ``choice`` one of several texts, ``regex`` a pattern that the whole
    answer matches, ``grammar`` one in the notation of llguidance, close to Lark's.

    Making one checks nothing; `spec` does.
    """

    json: Mapping[str, Any] | bool | str | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def spec(self, *, param: str = "structured_outputs") -> GrammarSpec:
        """Raises RequestError for none or several of them, and for what cannot be enforced; it begins with `param`."""
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise RequestError(
                f"{param} takes exactly one of {', '.join(names)}, got {', '.join(given) or 'none'}",
                param=param,
            )
        if self.json_object:
            return GrammarSpec.json_object()
        if self.json is not None:
            return GrammarSpec.json_schema(_schema(self.json, f"{param}.json"), param=f"{param}.json")
        if self.regex is not None:
            return GrammarSpec.regex(_text(self.regex, f"{param}.regex"), param=f"{param}.regex")
        if self.grammar is not None:
            return GrammarSpec.lark(_text(self.grammar, f"{param}.grammar"), param=f"{param}.grammar")
        choices: Any = self.choice
        if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence):
            raise RequestError(f"{param}.choice must be a list of texts", param=f"{param}.choice")
        return GrammarSpec.choice(
            [_text(each, f"{param}.choice") for each in choices], param=f"{param}.choice"
        )


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{param} must be text, got {type(value).__name__}", param=param)
    return value


def _schema(value: Any, param: str) -> Any:
    if isinstance(value, type):
        told = getattr(value, "model_json_schema", None)
        if not callable(told):
            raise RequestError(f"{param}: {value.__name__} has no model_json_schema", param=param)
        return told()
    if isinstance(value, str):
        try:
            return json_format.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(
                f"{param} must be a JSON schema, as an object or as text", param=param
            ) from None
    return value
