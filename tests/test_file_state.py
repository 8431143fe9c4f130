"""What tells whether a model that is a plain file or folder was changed where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toque.errors import ModelError
from toque.file_state import check_state, file_state

THEN = 10**18


def made(path: Path, content: bytes = b"x", then: int = THEN) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(then, then))
    return path


def test_a_state_changes_with_the_file_and_with_nothing_else(tmp_path: Path) -> None:
    file = made(tmp_path / "a" / "m.gguf")
    state = file_state(file)
    file = file.rename(tmp_path / "m.gguf")  # the folder is not part of it
    assert file_state(file) == state
    os.utime(file, ns=(THEN, THEN + 1))
    assert file_state(file) != state
    made(file, b"xy")
    assert file_state(file) != state
    assert file_state(made(file)) == state


def test_another_file_of_the_same_size_and_time_is_another_state(tmp_path: Path) -> None:
    """Archives and reproducible builds give files the same time."""
    large = b"x" * (1 << 16)
    file = made(tmp_path / "m.gguf", large)
    state = file_state(file)
    made(tmp_path / "fresh", large[:-1] + b"y").replace(file)
    assert file_state(file) != state


def test_a_small_file_is_read_and_a_large_one_is_not(tmp_path: Path) -> None:
    """The time of change is as coarse as the kernel's clock: two writes may have the same."""
    small, large = made(tmp_path / "s.gguf"), made(tmp_path / "l.gguf", bytes(1 << 16))
    before = file_state(small), file_state(large)
    made(small, b"y")
    large.chmod(0)
    assert file_state(small) != before[0]
    assert file_state(large) == before[1]


def test_a_folders_state_is_that_of_what_loading_reads(tmp_path: Path) -> None:
    folder = made(tmp_path / "model" / "config.json").parent
    states = [file_state(folder)]
    for name in ("weights.safetensors", "chat_template.jinja", "1_Pooling/config.json"):
        made(folder / name)
        states.append(file_state(folder))
    made(folder / "1_Pooling" / "config.json", b"y")
    states.append(file_state(folder))
    assert len(set(states)) == len(states)
    for name in ("train.log", "README.md", ".DS_Store", "optimizer.pt", "checkpoint-100/trainer_state.json"):
        made(folder / name)
    assert file_state(folder) == states[-1]


def test_a_part_changes_the_state_of_the_whole(tmp_path: Path) -> None:
    first = made(tmp_path / "m-00001-of-00002.gguf")
    second = made(tmp_path / "m-00002-of-00002.gguf")
    made(tmp_path / "n-00002-of-00002.gguf")
    state = file_state(first)
    made(tmp_path / "n-00002-of-00002.gguf", b"y")
    made(tmp_path / "m-00003-of-00003.gguf")
    assert file_state(first) == state
    made(second, b"y")
    assert file_state(first) != state


def test_a_link_has_its_targets_state_and_what_cannot_be_read_none(tmp_path: Path) -> None:
    target = made(tmp_path / "blob")
    link = tmp_path / "m.gguf"
    link.symlink_to(target)
    before = file_state(link)
    made(target, b"longer")
    assert file_state(link) != before
    assert file_state(tmp_path / "gone") == ""


def test_another_state_than_what_was_deployed_is_refused(tmp_path: Path) -> None:
    file = made(tmp_path / "m.gguf")
    state = file_state(file)
    check_state(file, state)
    check_state(file, "")
    made(file, b"y")
    with pytest.raises(ModelError, match=r"m\.gguf has changed since it was deployed: start a rollout"):
        check_state(file, state)
    file.unlink()
    with pytest.raises(ModelError, match="has changed"):
        check_state(file, state)
