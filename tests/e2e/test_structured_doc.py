"""The examples of docs/structured-output.md run as they are written, and the forms they ask for are kept."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from .server import Server

DOC = (Path(__file__).resolve().parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
OPENING, *EXAMPLES = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
LATER = [
    example for example in EXAMPLES if "from toque" not in example
]  # tests/engine has that of the library
PRINTED = (
    r"size='(small|large)' inhabitants=-?\d+\n",
    r'(positive|negative)\n\d{4}-\d{2}-\d{2}\nsum \d+(\+\d+)?\n\s*\[[\sxy",]*\]\n',
    r"(get_weather \{'city': '(Paris|London)'\}\n)+tool_calls\n",
)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_an_example(server: Server, number: int) -> None:
    assert len(LATER) == len(PRINTED)
    source = (OPENING + LATER[number]).replace("http://localhost:8000", server.url)
    source = source.replace('api_key="none"', f'api_key="{server.key}"').replace('"smollm2"', '"parrot"')
    if number == 2:
        source = source.replace('tool_choice="required"', 'tool_choice="required", parallel_tool_calls=False')
    printed = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/structured-output.md", "exec", dont_inherit=True), scope)
    scope["client"].close()
    assert re.fullmatch(PRINTED[number], printed.getvalue()), printed.getvalue()
