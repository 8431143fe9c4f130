"""Models of this machine: copied, so that the store's content can never change under its digest."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from toque.errors import DownloadError, FormatError
from toque.formats.folder import inside
from toque.registry.download import CHUNK, disk
from toque.registry.names import FileRef
from toque.registry.progress import Progress, Report
from toque.registry.sources.base import Fetch, Fetched, wanted
from toque.registry.training import model_folder, read_origin

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)


def fetch_file(reference: FileRef, work: Path, report: Report) -> Fetch:
    """A GGUF file (with its other parts, if it is split), or the model files of a folder or of its last checkpoint."""
    source = Path(reference.path).expanduser()
    if source.is_dir():
        origin = read_origin(source)
        source = model_folder(source)
        names = sorted(entry.name for entry in source.iterdir())
        ggufs = [name for name in names if name.endswith(".gguf")]
        own = {"config.json", "adapter_config.json"} & set(names)
        chosen = [name for name in names if wanted(name)] if own or not ggufs else ggufs
        if not chosen:
            raise DownloadError(f"{reference}: the folder holds no model files")
        files = [_copy(inside(source, name, name), name, work, report) for name in chosen]
        return Fetch(tuple(files), origin=origin)
    match = _PART.fullmatch(source.name)
    if match is None:
        return Fetch((_copy(source, source.name, work, report),))
    total = int(match[2])
    parts = [source.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, total + 1)]
    return Fetch(tuple(_copy(part, part.name, work, report) for part in parts))


def _copy(source: Path, name: str, work: Path, report: Report) -> Fetched:
    target = work / "files" / name
    sha, done = hashlib.sha256(), 0
    try:
        status = os.stat(source)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("is not a regular file", field=name)
        with open(source, "rb") as reading:
            with disk(name):
                target.parent.mkdir(parents=True, exist_ok=True)
            with disk(name), open(target, "wb") as out:
                while chunk := reading.read(CHUNK):
                    out.write(chunk)
                    sha.update(chunk)
                    done += len(chunk)
                    report(Progress("verify", name, done, status.st_size))
    except OSError as error:
        raise DownloadError(f"{name}: cannot be read: {error.strerror}") from error
    return Fetched(name, target, sha.hexdigest())
