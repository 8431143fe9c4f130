"""The short names that Toque knows without having pulled anything: `catalog.yaml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from toque.errors import ModelNotFoundError
from toque.registry.names import AliasRef, CatalogRef, PypiRef, Source, VersionRef, parse_reference

_PACKED = 1.12  # weights take a little more in the layout of the kernels than in the file
_WORKSPACE = 200 << 20  # interpreter, tokenizer, activations


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file of a model, made of one or more wheel members in order."""

    name: str
    size: int
    sha256: str
    parts: tuple[PypiRef, ...]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Either ``files`` with their digests, or a ``source`` to take everything from.

    ``size`` in bytes and ``parameters`` are about right, for choosing; ``context`` is the model's own, in tokens, and
    ``kv_per_token`` the bytes that each of them takes in the cache.
    """

    name: str
    description: str
    license: str
    files: tuple[CatalogFile, ...] = ()
    source: Source | None = None
    architecture: str = ""
    parameters: int = 0
    size: int = 0
    context: int = 0
    kv_per_token: int = 0

    def memory(self, context: int = 4_096) -> int:
        """About how many bytes serving it takes, with one conversation of ``context`` tokens at most."""
        return int(self.size * _PACKED) + min(context, self.context) * self.kv_per_token + _WORKSPACE


def parse_catalog(text: str) -> dict[str, CatalogEntry]:
    """The entries of a catalog file by name. The file is ours, so a mistake in it is a KeyError or ValueError."""
    import yaml

    entries: dict[str, CatalogEntry] = {}
    for name, value in yaml.safe_load(text).items():
        source = value.get("source")
        files = tuple(
            CatalogFile(file["name"], file["size"], file["sha256"], tuple(map(_part, file["parts"])))
            for file in value.get("files", ())
        )
        layers, kv_heads, head_size = value.get("cache", (0, 0, 0))
        entries[name] = CatalogEntry(
            name=name,
            description=value["description"],
            license=value["license"],
            files=files,
            source=None if source is None else _source(source),
            architecture=value["architecture"],
            parameters=int(float(value["parameters"])),
            size=sum(file.size for file in files) or int(float(value["size"])),
            context=value["context"],
            kv_per_token=2 * 2 * layers * kv_heads * head_size,
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
