"""The state of a model that is a plain file or folder: what tells whether it was changed where it is."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from toque.errors import ModelError

_READ = frozenset({".gguf", ".safetensors", ".json", ".jinja", ".txt", ".model"})  # what loading looks at
_FOLDERS = re.compile(r".+_Pooling|additional_chat_templates")
_PART = re.compile(r"(?P<stem>.+)-\d{5}(?P<count>-of-\d{5}\.gguf)", re.DOTALL)
_SMALL = 1 << 16  # bytes; what is smaller is read


def file_state(path: Path) -> str:
    """16 hex digits that change when the model at ``path`` does; "" where it cannot be looked at.

    Made from names, sizes, times of change and inode numbers of the files that loading reads, and from the content of
    the small ones: a model is not read to be named, so that one that was only touched counts as another. It does not
    depend on the folder that the model is in.
    """
    found = hashlib.sha256()
    try:
        for name, file in sorted(_files(path)):
            status = file.stat()
            found.update(
                f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode(
                    "utf-8", "surrogateescape"
                )
            )
            if status.st_size < _SMALL:
                found.update(file.read_bytes())
    except OSError:
        return ""
    return found.hexdigest()[:16]


def check_state(path: Path, state: str) -> None:
    """ModelError if the files at ``path`` are not those that were deployed (``state``; "": any will do)."""
    if state and file_state(path) != state:
        raise ModelError(
            f"{path} has changed since it was deployed: "
            "start a rollout to take up its new state, or put the old files back",
            param="model",
        )


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        part = _PART.fullmatch(path.name)
        if part is None:
            yield path.name, path
            return
        for file in path.parent.iterdir():
            other = _PART.fullmatch(file.name)
            if other is not None and other.groups() == part.groups():
                yield file.name, file
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file() and Path(entry.name).suffix in _READ:
                yield entry.name, Path(entry.path)
            elif entry.is_dir() and _FOLDERS.fullmatch(entry.name):
                yield from ((f"{entry.name}/{name}", file) for name, file in _files(Path(entry.path)))
