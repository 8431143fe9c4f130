"""Writes golden_files.json: what the `gguf` package reads in the real files, as digests.

    python tests/formats/make_golden_files.py MODEL.gguf...

The package takes 20 s for a large vocabulary, which is why the tests compare with its answers instead of asking it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf

GOLDEN = Path(__file__).with_name("golden_files.json")


def digest(items: Iterable[Any]) -> str:
    """sha256 over one JSON line an item; arrays of a million entries stay one item."""
    sha = hashlib.sha256()
    for item in items:
        sha.update(json.dumps(item, ensure_ascii=True).encode() + b"\n")
    return sha.hexdigest()


def value(field: gguf.ReaderField) -> Any:
    if field.types[0] == gguf.GGUFValueType.ARRAY and field.types[-1] == gguf.GGUFValueType.STRING:
        return [bytes(field.parts[index]).decode() for index in field.data]
    return field.contents()


def main(paths: list[str]) -> None:
    golden = {}
    for name in paths:
        reader = gguf.GGUFReader(name)
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        golden[Path(name).name] = {
            "metadata": digest([key, value(field)] for key, field in fields.items()),
            "n_metadata": len(fields),
            "tensors": digest(
                [t.name, t.tensor_type.name, t.shape.tolist(), int(t.data_offset), int(t.n_bytes)]
                for t in reader.tensors
            ),
            "n_tensors": len(reader.tensors),
            "types": sorted({t.tensor_type.name for t in reader.tensors}),
        }
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
