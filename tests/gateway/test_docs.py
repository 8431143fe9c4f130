"""docs/api.md: its tables are those of the code, and its examples run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toque.gateway.deployment import Deployment
from toque.gateway.http.fields import nested
from toque.gateway.http.reference import OPERATIONS
from toque.routing.fake import Script
from toque.types import EngineRequest

from .test_embeddings import give_vectors
from .world import EOS, Plan, World, build, served

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
OPENING, *LATER = EXAMPLES


def test_the_tables_are_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_api_doc.py", "--check"], check=True, timeout=60)


def test_every_path_is_described_and_every_body_has_an_example() -> None:
    for operation in OPERATIONS:
        assert f"`{operation.pattern}`" in DOC
    for operation in OPERATIONS:
        if operation.body is not None:
            section = re.search(
                rf"\n## [^\n]*{re.escape(operation.pattern)}\b.*?(?=\n## |\Z)", DOC, re.DOTALL
            )
            assert section, operation.pattern
            assert "```python" in section[0]
            assert operation.body.__name__ in section[0]
            for kind in nested(operation.body):
                assert f"\n`{kind.__name__}`\n" in DOC, f"{kind.__name__} has no table"


def script(request: EngineRequest) -> Script:
    """JSON where a grammar asks for it, so that examples of structured answers get one."""
    text = '{"city": "Paris"}' if request.grammar else "Paris"
    return Script(tokens=[*text.encode(), EOS])


@pytest.fixture
async def server() -> AsyncIterator[World]:
    """A model that generates, smollm2, and one that embeds, minilm."""
    async with served(Plan(name="smollm2", script=script)) as w:
        _, other, _, _ = build(Plan(name="minilm"))
        deployments: dict[str, Deployment] = w.gateway.deployments
        deployments["minilm"] = other
        w.deployment = other
        give_vectors(w)
        yield w


def run(source: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        scope: dict[str, Any] = {}
        exec(compile(source, "docs/api.md", "exec"), scope)
        if "client" in scope:
            scope["client"].close()
    return printed.getvalue()


@pytest.mark.parametrize("example", LATER, ids=range(len(LATER)))
async def test_every_example_runs(server: World, example: str) -> None:
    source = (OPENING + example).replace("http://localhost:8000", server.url)
    printed = await asyncio.to_thread(run, source)
    assert "['smollm2', 'minilm']" in printed
    assert len(printed.splitlines()) > 1, "an example shows what it got"
