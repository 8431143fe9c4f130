"""One file over HTTP: resumed where it was cut, checked at the end, never visible before."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from toque.errors import DownloadError, StoreError
from toque.registry.progress import Progress, Report

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 6
CHUNK = 1 << 20
_HEADROOM = 64 << 20  # bytes of disk that a download leaves free


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a file is and what it should be. ``sha256`` and ``size`` are None where the source does not say."""

    url: str
    name: str
    sha256: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def http_client(certificates: str | None = None, *, timeout_s: float = 60.0) -> Iterator[httpx.Client]:
    """A client that trusts ``certificates`` (a PEM file or folder), or what the environment says."""
    import httpx

    verify: ssl.SSLContext | bool = True
    if certificates:
        folder = os.path.isdir(certificates)
        try:
            verify = ssl.create_default_context(
                cafile=None if folder else certificates, capath=certificates if folder else None
            )
        except OSError as error:
            raise DownloadError(f"the certificates {certificates} cannot be read: {error}") from error
    with httpx.Client(verify=verify, follow_redirects=True, timeout=timeout_s) as client:
        yield client


def download(
    client: httpx.Client, remote: Remote, target: Path, report: Report, *, pause_s: float = 0.5
) -> str:
    """Bring ``remote`` to ``target`` and return its sha256.

    Bytes go to ``target`` + ``.part``, which a later call continues when the server can and the file there is still
    the same one. A broken connection is tried again a few times. Raises DownloadError (what has arrived is kept,
    unless its digest is wrong) or StoreError when the disk is full.
    """
    import httpx

    if target.exists() and target.stat().st_size == remote.size:
        digest = file_sha256(target, remote.name, report)
        if remote.sha256 in (None, digest):
            return digest  # complete since an earlier call that failed at another file
    part = target.with_name(target.name + ".part")
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(client, remote, part, report)
            break
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 and status != 429:
                raise DownloadError(f"{remote.name}: {_host(remote.url)} answered {status}") from None
            reason, busy = f"it answered {status}", True
        except httpx.HTTPError as error:
            reason, busy = f"{type(error).__name__}: {str(error)[:120]}", False
        after = part.stat().st_size if part.exists() else 0
        if attempt == ATTEMPTS - 1 or (attempt >= 2 and after <= before and not busy):
            # Raised from nothing: the library's own words show the address, and that may be a signed one.
            raise DownloadError(
                f"{remote.name}: the download from {_host(remote.url)} broke off after {after} bytes ({reason}); "
                "pull again to continue"
            ) from None
        time.sleep(pause_s * 2**attempt)
    digest = _checked(remote, part, report)
    os.replace(part, target)
    _validator(part).unlink(missing_ok=True)
    return digest


def _transfer(client: httpx.Client, remote: Remote, part: Path, report: Report) -> None:
    """One GET, appended to what is there when the server agrees that it is the same file."""
    import httpx

    validator = _validator(part)
    start = part.stat().st_size if part.exists() else 0
    if remote.size is not None and start == remote.size:
        with disk(remote.name):
            part.touch()  # an empty file is complete before it begins
        return
    headers = dict(remote.headers)
    headers["Accept-Encoding"] = "identity"  # a Range counts the bytes that are sent
    tag = _read_tag(validator, remote)
    if start and tag is not None:
        headers["Range"] = f"bytes={start}-"
        if tag:
            headers["If-Range"] = tag
    else:
        start = 0
    with client.stream("GET", remote.url, headers=headers) as response:
        if response.status_code == 416:  # what we have is not a part of what they have
            part.unlink(missing_ok=True)
            validator.unlink(missing_ok=True)
            raise httpx.ReadError("the server has no more of this file; starting again")
        response.raise_for_status()
        resumed = response.status_code == 206 and start > 0
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise DownloadError(f"{remote.name}: {_host(remote.url)} continued at another place than asked")
        if not resumed:
            start = 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else remote.size
        if remote.size is not None and total != remote.size:
            raise DownloadError(
                f"{remote.name}: {remote.size} bytes were expected, the server offers {total}"
            )
        _check_space(part, remote.name, (total or 0) - start)
        _write_tag(validator, remote, response.headers.get("ETag", ""))
        done = start
        with disk(remote.name), open(part, "r+b" if resumed else "wb") as file:
            file.seek(start)
            report(Progress("download", remote.name, done, total))
            for (
                chunk
            ) in response.iter_raw():  # as they arrive: a fixed size would lose the rest of a broken one
                file.write(chunk)
                done += len(chunk)
                if total is not None and done > total:
                    raise DownloadError(f"{remote.name}: more than the {total} bytes announced were sent")
                report(Progress("download", remote.name, done, total))
        if total is not None and done < total:
            raise httpx.ReadError(f"{done} of {total} bytes")


def _checked(remote: Remote, part: Path, report: Report) -> str:
    digest = file_sha256(part, remote.name, report)
    if remote.sha256 is not None and digest != remote.sha256:
        part.unlink()
        _validator(part).unlink(missing_ok=True)
        raise DownloadError(
            f"{remote.name}: sha256 {digest} is not the expected {remote.sha256}; the file was thrown away"
        )
    return digest


def file_sha256(path: Path, name: str, report: Report) -> str:
    """The file's digest, reporting as it goes (about 1 GB a second)."""
    sha, total, done = hashlib.sha256(), path.stat().st_size, 0
    with open(path, "rb") as file:
        while chunk := file.read(4 * CHUNK):
            sha.update(chunk)
            done += len(chunk)
            report(Progress("verify", name, done, total))
    return sha.hexdigest()


@contextmanager
def disk(name: str) -> Iterator[None]:
    """Turns a full or read-only disk into a StoreError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise StoreError(f"{name}: cannot be written: {error.strerror}") from error


def _check_space(part: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed + _HEADROOM > free:
        raise StoreError(
            f"{name}: {needed >> 20} MB are still to come, but {part.parent} has {free >> 20} MB free; make room, "
            "or point TOQUE_HOME to another disk"
        )


def _validator(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_tag(path: Path, remote: Remote) -> str | None:
    """The ETag of the partial file ("" when the digest will tell), or None when it may be another file's."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or known.get("sha256") != remote.sha256:
        return None
    tag = known.get("etag")
    if remote.sha256 is not None:
        return ""
    return tag if isinstance(tag, str) and tag and not tag.startswith("W/") else None


def _write_tag(path: Path, remote: Remote, etag: str) -> None:
    with disk(remote.name):
        path.write_text(json.dumps({"sha256": remote.sha256, "etag": etag}), encoding="utf-8")


def _host(url: str) -> str:
    """For messages: no path, and above all no user name or token."""
    return urlsplit(url).hostname or "the server"
