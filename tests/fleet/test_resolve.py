"""What a model reference is pinned to, and what clients are told of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toque.file_state import file_state
from toque.fleet.resolve import file_label, resolve
from toque.fleet.revisions import revision_of
from toque.fleet.spec import DeploymentSpec, Resources
from toque.fleet.store import Revision


def made(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("small.gguf", "small"),
        ("模型 Größe.v2.gguf", "Gr-e.v2"),
        ("模型.gguf", "model"),
        ("a\r\nb", "a-b"),
        ("x" * 200, "x" * 64),
    ],
)
def test_a_label_is_a_header_value_without_the_folder(tmp_path: Path, name: str, shown: str) -> None:
    file = made(tmp_path / "secret" / name)
    label = file_label(file, file_state(file))
    assert re.fullmatch(re.escape(shown) + "-[0-9a-f]{8}", label, re.ASCII)


def test_a_label_says_which_state_of_the_file_it_is(tmp_path: Path) -> None:
    file = made(tmp_path / "m.gguf")
    state = file_state(file)
    assert file_label(file, state) == f"m-{state[:8]}"
    assert file_label(tmp_path / "gone", "") == "gone-unknown"


async def test_a_version_is_told_by_its_label_and_routed_by_its_key(tmp_path: Path) -> None:
    path = made(tmp_path / "größe.gguf")
    spec = DeploymentSpec("m", str(path), engine={"max_sequences": 4}, resources=Resources(memory_mb=1))
    served = revision_of(await resolve(str(path)), spec).served()
    assert served.label == file_label(path, file_state(path))
    assert served.state == file_state(path)
    assert str(path) in served.key
    unlabelled = revision_of(Revision("", str(path), str(path)), spec).served()  # a row of an earlier release
    assert unlabelled.label == "größe.gguf"
    assert unlabelled.key == served.key.replace(f"@{served.state}", "")
