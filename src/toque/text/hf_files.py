"""Small JSON and text files of a Hugging Face model folder, read with a bound on their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toque.errors import FormatError

MAX_JSON = 16 << 20


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object, ``{}`` where there is no such file. FormatError names the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not valid JSON ({str(error)[:80]})", field=path.name) from error
    if not isinstance(value, dict):
        raise FormatError("must be a JSON object", field=path.name)
    return value


def read_text(path: Path, limit: int) -> str:
    size = path.stat().st_size
    if size > limit:
        raise FormatError(f"has {size} bytes; at most {limit} are read", field=path.name)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("is not valid UTF-8", field=path.name) from error
