"""The short names that Toque knows without having pulled anything: `catalog.yaml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from toque.errors import ModelNotFoundError
from toque.registry.names import AliasRef, CatalogRef, PypiRef, Source, VersionRef, parse_reference


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file of a model, made of one or more wheel members in order."""

    name: str
    size: int
    sha256: str
    parts: tuple[PypiRef, ...]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Either ``files`` with their digests, or a ``source`` to take everything from."""

    name: str
    description: str
    license: str
    files: tuple[CatalogFile, ...] = ()
    source: Source | None = None


def parse_catalog(text: str) -> dict[str, CatalogEntry]:
    """The entries of a catalog file by name. The file is ours, so a mistake in it is a KeyError or ValueError."""
    import yaml

    entries: dict[str, CatalogEntry] = {}
    for name, value in yaml.safe_load(text).items():
        source = value.get("source")
        entries[name] = CatalogEntry(
            name=name,
            description=value["description"],
            license=value["license"],
            files=tuple(
                CatalogFile(file["name"], file["size"], file["sha256"], tuple(map(_part, file["parts"])))
                for file in value.get("files", ())
            ),
            source=None if source is None else _source(source),
        )
    return entries


def _part(text: str) -> PypiRef:
    reference = parse_reference(text)
    if not isinstance(reference, PypiRef) or not reference.path:
        raise ValueError(f"{text}: a part is a member of a wheel")
    return reference


def _source(text: str) -> Source:
    reference = parse_reference(text)
    if isinstance(reference, CatalogRef | VersionRef | AliasRef):
        raise ValueError(f"{text}: a source is a URI")
    return reference


@cache
def builtin() -> Mapping[str, CatalogEntry]:
    return parse_catalog(files("toque.registry").joinpath("catalog.yaml").read_text(encoding="utf-8"))


def find(name: str, catalog: Mapping[str, CatalogEntry]) -> CatalogEntry:
    """The entry of that name, or ModelNotFoundError with the names there are."""
    entry = catalog.get(name)
    if entry is None:
        raise ModelNotFoundError(
            f"{name!a} is neither in the store nor in the catalog ({', '.join(sorted(catalog))}); "
            "name a source such as hf:org/repo, pypi:package==version#path or file:/path",
            param="model",
        )
    return entry
