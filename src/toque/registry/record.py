"""What the store remembers of a model, and its JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toque.errors import StoreError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model: its place in the model (a relative name), its size in bytes, and its blob."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model of the store. ``problem`` says why Toque cannot run it yet, or is empty."""

    name: str
    source: str
    files: tuple[StoredFile, ...]
    revision: str = ""
    license: str = ""
    description: str = ""
    pulled_at: int = 0  # seconds since the epoch
    format: str = ""
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    context_length: int = 0
    problem: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """sha256 over the files' names and contents: equal for equal models, whatever they are called."""
        lines = sorted(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """For people and scripts: every field, and the derived ones."""
        return {**asdict(self), "size": self.size, "digest": self.digest}


def dump(record: ModelRecord) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(record)}, indent=2).encode() + b"\n"


def load(data: bytes, where: str) -> ModelRecord:
    """The record of a manifest. Raises StoreError when it is damaged or of a newer Toque."""
    try:
        values: Mapping[str, Any] = json.loads(data)
        if values["schema"] != SCHEMA:
            raise StoreError(
                f"{where}: schema {values['schema']!r} is not one that this version of Toque reads"
            )
        fields = {key: value for key, value in values.items() if key not in ("schema", "files")}
        return ModelRecord(files=tuple(StoredFile(**file) for file in values["files"]), **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{where}: the manifest is damaged ({type(error).__name__}); remove it") from error
