"""Files of a model folder, opened without trusting the folder.

A folder from a stranger may name files in an index, and may hold links, FIFOs or directories where files are
expected. A name is accepted only as a plain file name of the folder; a link only if it leads to a place inside the
folder or into a ``blobs`` store beside it (how Hugging Face's cache and Toque's own store share files). Everything
else is refused before the target is touched, with the same words whether or not it exists.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from toque.errors import FormatError

MAX_JSON = 16 << 20
_MAX_NAME = 255


def inside(folder: Path, name: object, field: str) -> Path:
    """The path of a folder's file, once its name and its links have been judged. The file may be absent.

    Raises FormatError with ``field`` when the name is not a plain file name or leads out of the folder.
    """
    if not isinstance(name, str):
        raise FormatError(f"must be a file name, got {type(name).__name__}", field=field)
    if (
        not name
        or len(os.fsencode(name.encode("utf-8", "replace"))) > _MAX_NAME
        or name in (".", "..")
        or not name.isprintable()
        or any(separator in name for separator in "/\\:\0")
    ):
        shown = ascii(name if len(name) <= 60 else name[:57] + "...")
        raise FormatError(f"{shown} is not a plain file name", field=field)
    root = Path(os.path.realpath(folder))
    path = root / name
    target = Path(os.path.realpath(path))
    if target != path and not any(target.is_relative_to(allowed) for allowed in _allowed(root)):
        raise FormatError(f"{name} is a link that leads out of the model folder", field=field)
    return target


def _allowed(root: Path) -> tuple[Path, ...]:
    """The folder itself, and the blob stores that a cache's snapshot folder, or a folder inside one, links to."""
    return (root, *(parent / "blobs" for parent in (*root.parents,)[:3]))


def exists(folder: Path, name: str) -> bool:
    """Whether the folder has anything of that name, a dangling link included; follows nothing."""
    return os.path.lexists(folder / name)


def read_bytes(folder: Path, name: str, limit: int = MAX_JSON) -> bytes:
    """A small file's content. Raises FormatError when it is missing, not a regular file, or longer than ``limit``."""
    path = inside(folder, name, name)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError("is not a regular file", field=name)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise FormatError("the file is missing", field=name) from None
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", field=name) from error
    if len(data) > limit:
        raise FormatError(f"is larger than the {limit} bytes that Toque accepts", field=name)
    return data


def read_json(folder: Path, name: str, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object. Raises FormatError for anything else."""
    return parse_object(read_bytes(folder, name, limit), name)


def parse_object(data: bytes, field: str) -> dict[str, Any]:
    """Bytes that must be a JSON object without duplicate keys."""
    value = parse_value(data, field)
    if not isinstance(value, dict):
        raise FormatError(f"must be a JSON object, got {type(value).__name__}", field=field)
    return value


def parse_value(data: bytes, field: str) -> Any:
    """Bytes that must be JSON whose objects have no duplicate keys."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors too
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise FormatError(f"is not valid JSON: {reason}", field=field) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:60]!a} appears twice")
    return result
