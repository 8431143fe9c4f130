"""Writes the tables of docs/api.md from the types in use: ``python scripts/make_api_doc.py [--check]``.

What stands between ``<!-- fields: Type … -->`` (or ``<!-- paths -->``) and ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from msgspec import Struct

from toque.gateway.http import embedding_types, openai_types
from toque.gateway.http.fields import declared, type_name
from toque.gateway.http.reference import OPERATIONS

DOC = Path(__file__).resolve().parents[1] / "docs" / "api.md"
SECTION = re.compile(r"<!-- (fields: [\w ]+|paths) -->\n.*?<!-- end -->", re.DOTALL)


def render(text: str) -> str:
    """The document with its tables as they are now."""
    return SECTION.sub(lambda found: f"<!-- {found[1]} -->\n{_section(found[1])}<!-- end -->", text)


def _section(what: str) -> str:
    if what == "paths":
        return _paths()
    names = what.removeprefix("fields: ").split()
    tables = [_fields(_type(name), titled=number > 0) for number, name in enumerate(names)]
    return "\n".join(tables)


def _fields(kind: type[Struct], titled: bool) -> str:
    lines = [f"`{kind.__name__}`\n"] if titled else []
    lines += ["| field | type | | |", "|---|---|---|---|"]
    for field in declared(kind):
        text = field.text.replace("|", "\\|")
        lines.append(
            f"| `{field.name}` | {type_name(field.type)} | {field.handling} | {text} |".replace("  |", " |")
        )
    return "\n".join(lines) + "\n"


def _paths() -> str:
    lines = ["| | path | | statuses |", "|---|---|---|---|"]
    for operation in OPERATIONS:
        key = () if not operation.needs_key else (401,)
        statuses = ", ".join(map(str, sorted({200, 403, 500, *operation.statuses, *key})))
        lines.append(f"| {operation.method} | `{operation.pattern}` | {operation.summary} | {statuses} |")
    lines += ["", "| path | parameter | in | |", "|---|---|---|---|"]
    for operation in OPERATIONS:
        for parameter in operation.parameters:
            text = parameter.text.replace("|", "\\|")
            lines.append(f"| `{operation.pattern}` | `{parameter.name}` | {parameter.place} | {text} |")
    return "\n".join(lines) + "\n"


def _type(name: str) -> type[Struct]:
    found = getattr(openai_types, name, None) or getattr(embedding_types, name, None)
    if found is None:
        raise SystemExit(f"{DOC}: there is no type {name}")
    kind: type[Struct] = found
    return kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the tables are old")
    check = parser.parse_args().check
    text = DOC.read_text(encoding="utf-8")
    made = render(text)
    if check and made != text:
        print(f"{DOC} is old: run python scripts/make_api_doc.py", file=sys.stderr)
        return 1
    if made != text:
        DOC.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
