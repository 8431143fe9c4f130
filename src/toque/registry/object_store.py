"""S3 and whatever speaks its protocol, through obstore: the only file that imports it.

obstore signs, lists, uploads and deletes. Downloads go through `toque.registry.download` over signed URLs, so that
they resume, report and are checked as those of every other source are.

Credentials come from where AWS's own tools look for them (AWS_ACCESS_KEY_ID …, a role, an instance's metadata), never
from a URL: settings hold references, not secrets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from toque.errors import ConfigError, DownloadError, StoreError
from toque.registry.progress import Progress, Report

if TYPE_CHECKING:
    from obstore.store import S3Store

PART = 8 << 20  # bytes of one part of an upload
_OPTIONS = ("endpoint", "region", "virtual_hosted_style_request")
_SIGNED_FOR = timedelta(hours=12)
_RETRY: Any = {
    "max_retries": 5,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """``modified`` is in seconds since the epoch."""

    key: str
    size: int
    modified: float
    etag: str


class ObjectStore:
    """A bucket, or what lies below a prefix of it. An object is whole or absent: uploads appear at their end.

    A server that is busy (503) or drops a connection is asked again for up to a minute; then StoreError.
    """

    def __init__(self, url: str) -> None:
        """``s3://bucket/prefix?endpoint=https://host&region=…``. ConfigError for anything else, secrets above all."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme != "s3" or not parts.hostname:
            raise ConfigError(
                f"expected s3://bucket/prefix, got {url.split('?')[0][:80]!a}", param="registry.blobs"
            )
        if parts.username is not None or parts.password is not None or not options.keys() <= set(_OPTIONS):
            raise ConfigError(
                f"s3://{parts.hostname}: a URL has the options {', '.join(_OPTIONS)} and no other; "
                "credentials belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role",
                param="registry.blobs",
            )
        self.shown = f"s3://{parts.hostname}{parts.path}"
        self._store = _open(parts.hostname, parts.path.strip("/"), options)

    def find(self, key: str) -> StoredObject | None:
        import obstore

        with _reported(f"{self.shown}/{key}"):
            try:
                return _object(obstore.head(self._store, key))
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        import obstore

        with _reported(f"{self.shown}/{prefix}"):
            for page in obstore.list(self._store, prefix or None):
                yield from map(_object, page)

    def upload(self, path: Path, key: str, sha256: str, report: Report, name: str) -> None:
        """Put a file under ``key``, if it really has that digest; StoreError otherwise, and nothing appears."""
        import obstore

        size = path.stat().st_size
        with _reported(f"{self.shown}/{key}"):
            # Every request carries a checksum, which the server compares; the whole is compared here.
            pieces = _checked(path, size, sha256, report, name)
            if size <= PART:
                obstore.put(self._store, key, b"".join(pieces))
            else:
                obstore.put(self._store, key, pieces, chunk_size=PART)
        stored = self.find(key)
        if stored is None or stored.size != size:
            found = "nothing" if stored is None else f"{stored.size} bytes"
            raise StoreError(f"{self.shown}/{key}: {size} bytes were sent, the server has {found}")

    def signed_url(self, key: str) -> str:
        """An address from which anybody can read the object for twelve hours. Never to be logged."""
        import obstore

        with _reported(f"{self.shown}/{key}"):
            return obstore.sign(self._store, "GET", key, _SIGNED_FOR)

    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        with _reported(self.shown):
            obstore.delete(self._store, list(keys))


def _open(bucket: str, prefix: str, options: dict[str, str]) -> S3Store:
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError:
        raise ConfigError("S3 needs a client: pip install 'toque[s3]'", param="registry.blobs") from None
    endpoint = (
        options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    config: dict[str, Any] = {"checksum_algorithm": "SHA256", **options}
    if endpoint:
        config["endpoint"] = endpoint
    plain = bool(endpoint) and str(endpoint).startswith("http://")
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,  # type: ignore[arg-type]  # a TypedDict, checked against _OPTIONS above
        client_options={"allow_http": plain, "connect_timeout": timedelta(seconds=10)},
        retry_config=_RETRY,
    )


@contextmanager
def _reported(what: str) -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise DownloadError(f"{what}: there is nothing of that name") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreError(f"{what}: the server refuses these credentials") from error
    except BaseError as error:
        raise StoreError(f"{what}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """An error's first line, without the request's address: it may be signed."""
    text = " ".join(str(error).split())
    return " ".join(word.split("?")[0] for word in text.split())[:300]


def _object(meta: Any) -> StoredObject:
    modified: datetime = meta["last_modified"]
    return StoredObject(
        meta["path"], int(meta["size"]), modified.astimezone(UTC).timestamp(), meta.get("e_tag") or ""
    )


def _checked(path: Path, size: int, sha256: str, report: Report, name: str) -> Iterator[bytes]:
    sha, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
            done += len(chunk)
            if done == size and sha.hexdigest() != sha256:
                break
            yield chunk
            report(Progress("upload", name, done, size))
    if sha.hexdigest() != sha256:  # raised here, the upload is given up
        raise StoreError(f"{name}: its sha256 is {sha.hexdigest()}, not {sha256}: it is not stored")
