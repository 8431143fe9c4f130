"""What a model reference is pinned to, and what clients are told of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

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
    label = file_label(made(tmp_path / "secret" / name))
    assert re.fullmatch(re.escape(shown) + "-[0-9a-f]{8}", label, re.ASCII)


def test_a_label_changes_with_the_file_and_with_nothing_else(tmp_path: Path) -> None:
    file = made(tmp_path / "a" / "m.gguf")
    os.utime(file, ns=(1, 10**18))
    label = file_label(file)
    file.rename(tmp_path / "m.gguf")  # the folder is not part of it
    file = tmp_path / "m.gguf"
    assert file_label(file) == label
    os.utime(file, ns=(1, 10**18 + 1))
    assert file_label(file) != label
    made(file, b"xy")
    os.utime(file, ns=(1, 10**18))
    assert file_label(file) != label


def test_a_folders_label_changes_with_any_of_its_files(tmp_path: Path) -> None:
    folder = made(tmp_path / "model" / "config.json").parent
    before = file_label(folder)
    assert before.startswith("model-")
    assert file_label(folder) == before
    made(folder / "weights.safetensors")
    assert file_label(folder) != before


def test_a_link_has_its_targets_state_and_what_cannot_be_read_a_label(tmp_path: Path) -> None:
    target = made(tmp_path / "blob")
    link = tmp_path / "m.gguf"
    link.symlink_to(target)
    before = file_label(link)
    made(target, b"longer")
    assert file_label(link) != before
    assert file_label(tmp_path / "gone").startswith("gone-")


async def test_a_version_is_told_by_its_label_and_routed_by_its_key(tmp_path: Path) -> None:
    path = made(tmp_path / "größe.gguf")
    spec = DeploymentSpec("m", str(path), engine={"max_sequences": 4}, resources=Resources(memory_mb=1))
    served = revision_of(await resolve(str(path)), spec).served()
    assert served.label == file_label(path)
    assert str(path) in served.key
    unlabelled = revision_of(Revision("", str(path), str(path)), spec).served()  # a row of an earlier release
    assert unlabelled.label == "größe.gguf"
    assert unlabelled.key == served.key
