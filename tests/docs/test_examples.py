"""What the documentation shows is run as it is written there, against the real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import Server, serving
from toque.cli.main import VERBS
from toque.registry.store import Store

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"  # where the examples expect the server; the test's has another port
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/dependencies.md")


def block(language: str, word: str) -> str:
    """The one code block of the README in that language that has the word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if word in text]
    return found


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, name="smollm2", backend="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def home(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has the model under its catalog name, as after `toque pull smollm2`."""
    folder = tmp_path_factory.mktemp("home")
    Store(folder).pull(f"file:{smollm2}", name="smollm2")
    return folder


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_curl_call_is_answered_with_sense(server: Server) -> None:
    command = block("bash", "curl")
    assert ADDRESS in command
    done = subprocess.run(
        ["bash", "-ec", command.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert answer == "The capital of France is Paris."
    assert f'"{answer}"' in README  # the README says so itself


@pytest.mark.model
def test_the_openai_client_prints_a_text(server: Server) -> None:
    code = block("python", "from openai")
    assert ADDRESS in code
    assert python(code.replace(ADDRESS, server.url)).strip()  # what it says is drawn at random


@pytest.mark.model
def test_the_library_prints_a_text(home: Path) -> None:
    assert len(python(block("python", "import toque"), TOQUE_HOME=str(home)).split()) > 3


def test_every_verb_is_in_the_readme_and_every_verb_there_exists() -> None:
    section = README[README.index("## The command line") : README.index("## What works today")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(?:toque )?([a-z]+)", row)}
    assert named == set(VERBS)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
        assert {a or b for a, b in named} <= targets, page


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    here = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (here / link).exists(), link
    places = (ROOT, ROOT / "src/toque", ROOT / "src/toque/gateway", ROOT / "native/src")
    for path in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|cc|h|md|proto|sh)|\w+\.(?:cc|h))(?:::\w+)?`", text):
        assert any((place / path).exists() for place in places), path
