"""What the registry knows of a version: its files, and where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import Struct, to_builtins

from toque.registry.record import StoredFile


class Status(StrEnum):
    PENDING = "PENDING"  # its files are on their way
    READY = "READY"  # complete, and from now on unchangeable
    FAILED = "FAILED"  # its files never came
    ARCHIVED = "ARCHIVED"  # retired: its row and lineage stay, its files may go


@dataclass(frozen=True, slots=True)
class Lineage:
    """The run that made a version. ``params`` are the training's, ``metrics`` its last values."""

    system: str = ""
    run_id: str = ""
    run_url: str = ""
    external_model_id: str = ""
    git_commit: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionInput:
    """Something that a version was made from. ``context`` is its part in that: training, parent …"""

    kind: str  # dataset or model
    name: str
    digest: str = ""
    source_type: str = ""
    source: str = ""
    context: str = ""


@dataclass(frozen=True, slots=True)
class EvalResult:
    metric: str
    value: float
    task: str = ""
    dataset: str = ""
    revision: str = ""
    split: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a source says of itself beyond its files."""

    lineage: Lineage | None = None
    inputs: tuple[VersionInput, ...] = ()
    evaluations: tuple[EvalResult, ...] = ()
    card: dict[str, Any] = field(default_factory=dict)
    license: str = ""
    base_model: str = ""
    base_relation: str = ""
    dtype: str = ""


NO_ORIGIN = Origin()


class ModelVersion(Struct, frozen=True):  # thousands are made at once: a Struct is made ten times as fast
    """A row of the registry. ``version`` is 0 until it has one; ``created_at`` counts microseconds."""

    model: str
    version: int
    status: Status
    digest: str
    size: int
    created_at: int
    created_by: str = ""
    problem: str = ""
    source_uri: str = ""
    resolved_uri: str = ""
    format: str = ""
    arch: str = ""
    params: int = 0
    dtype: str = ""
    quantization: str = ""
    context_length: int = 0
    license: str = ""
    base_model: str = ""
    base_relation: str = ""
    files: tuple[StoredFile, ...] = ()
    card: dict[str, Any] = {}
    tags: dict[str, str] = {}
    aliases: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        return f"{self.model}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        """For people and scripts: every field, and the reference."""
        return {"reference": self.reference, **to_builtins(self)}


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    name: str
    description: str
    tags: dict[str, str]
    created_at: int
    versions: int = 0  # that are ready
    newest: int = 0  # of those; 0: none
    aliases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alias:
    model: str
    alias: str
    version: int
    moved_at: int


@dataclass(frozen=True, slots=True)
class AliasEvent:
    """``previous`` or ``version`` is None where there was, or is, none."""

    id: int
    model: str
    alias: str
    previous: int | None
    version: int | None
    actor: str
    at: int


def plain_json(value: Any, depth: int = 8) -> Any:
    """A value that every database's JSON takes: no NaN, no NUL, text as keys, and bounded in all directions.

    Bounded as it is written out: YAML's aliases make a page of text into more values than a machine can hold.
    """
    left = [20_000]

    def plain(value: Any, depth: int) -> Any:
        left[0] -= 1
        if isinstance(value, bool) or value is None or left[0] < 0:
            return value if isinstance(value, bool) else None
        if isinstance(value, int):
            return value if abs(value) < 2**63 else clean(hex(value), 100)
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, dict) and depth:
            items = list(value.items())[: max(left[0], 0)]
            return {clean(str(key), 256): plain(item, depth - 1) for key, item in items if left[0] > 0}
        if isinstance(value, list | tuple | set) and depth:
            return [plain(item, depth - 1) for item in list(value)[: max(left[0], 0)] if left[0] > 0]
        if isinstance(value, dict | list | tuple | set):
            return None
        return clean(str(value), 10_000)

    return plain(value, depth)


def clean(text: str, length: int) -> str:
    """Text that fits a column: no NUL, no half of a surrogate pair, at most ``length`` characters."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")[:length]
