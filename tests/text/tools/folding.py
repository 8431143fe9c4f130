"""Feeding parsers in pieces, and folding what comes out, as a client would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from toque.text.tools.base import HOLD, Delta, ParserOptions, TextDelta, ToolParser
from toque.text.tools.choose import tool_parser

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "c": {"$ref": "#/$defs/colour"},
            "id": {"type": "integer"},
            "o": {"type": ["object", "null"]},
        },
        "$defs": {"colour": {"enum": ["red", "2"]}},
    }
}


@dataclass
class Folded:
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    ids: list[str] = field(default_factory=list)
    completed: int = 0

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                self.content += delta.text
            elif delta.name is not None:
                assert delta.index == len(self.calls), "calls come in order"
                assert delta.id
                assert delta.arguments == ""
                self.calls.append((delta.name, ""))
                self.ids.append(delta.id)
            else:
                assert delta.id is None
                assert delta.arguments
                assert delta.index == len(self.calls) - 1
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + delta.arguments)

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def options(names: Iterable[str] = (), **fields: Any) -> ParserOptions:
    numbers = count()
    return ParserOptions(**{"names": frozenset(names), "new_id": lambda: f"id{next(numbers)}", **fields})


def fold(make: Callable[[], ToolParser], pieces: Iterable[str]) -> Folded:
    parser = make()
    folded = Folded()
    for piece in pieces:
        folded.add(parser.push(piece))
    folded.add(parser.finish())
    folded.completed = parser.completed
    assert len(set(folded.ids)) == len(folded.ids)
    return folded


def maker(
    dialect: str, names: Iterable[str] = ("f", "g", "get_weather"), hold: int = HOLD
) -> Callable[[], ToolParser]:
    return lambda: tool_parser(dialect, options(names, hold=hold, schemas=SCHEMAS))


def chunkings(text: str) -> Iterator[list[str]]:
    """All at once, in pieces of each small size, and cut in two at every place, and around every other."""
    yield [text]
    for size in (1, 2, 3, 5, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
        yield [text[: place - 1], text[place - 1 : place], "", text[place:]]


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]
