from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.parrot import CHAT_TEMPLATE, make_parrot, script

from .server import Server, serving

ANSWER = [" a", b"\xe6\xad", b"\xaa", " b", " ", "."]
TEXT = " a歪 b ."


@pytest.fixture(scope="package")
def parrot_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers a chat, or a prompt ending in a newline, with TEXT; a prompt ending in "!" with x and y for ever."""
    transitions = {**script("\n", ANSWER), "!": "x", "x": "y", "y": "x"}
    folder = tmp_path_factory.mktemp("models") / "parrot"
    return make_parrot(folder, transitions, chat_template=CHAT_TEMPLATE, context_length=16384)


@pytest.fixture(scope="package")
def server(parrot_folder: Path) -> Iterator[Server]:
    """One server that the tests share; those that stop or hurt one start their own."""
    with serving(parrot_folder, key="k1", name="parrot") as running:
        yield running
