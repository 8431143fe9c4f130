"""The blob store that several machines share: every file once, under its digest, in S3 or what speaks its protocol.

In front of it stands the local store (`toque.registry.store`), which is a cache then: what was brought once is read
from there, and its content was checked when it came.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toque.registry.download import Remote, download, http_client
from toque.registry.object_store import ObjectStore
from toque.registry.progress import Report
from toque.registry.record import StoredFile
from toque.registry.sources.base import Fetched

_KEY = re.compile(r"(?:.*/)?sha256-([0-9a-f]{64})")
DELETED_AT_ONCE = 100


class SharedBlobs:
    """Guarantees: a blob is there whole or not at all, and neither put nor brought with another content than its
    digest's; one that is there is not sent again. StoreError or DownloadError when the server is away."""

    def __init__(self, url: str) -> None:
        self._objects = ObjectStore(url)

    @property
    def shown(self) -> str:
        return self._objects.shown

    def has(self, file: StoredFile) -> bool:
        found = self._objects.find(_key(file.sha256))
        return found is not None and found.size == file.size

    def put(self, file: StoredFile, path: Path, report: Report) -> bool:
        """Whether it had to be sent."""
        if self.has(file):
            return False
        self._objects.upload(path, _key(file.sha256), file.sha256, report, file.name)
        return True

    def get(self, file: StoredFile, work: Path, report: Report) -> Fetched:
        """Bring a blob into a working folder; one that was cut off continues."""
        target = work / "files" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        url = self._objects.signed_url(_key(file.sha256))
        with http_client(os.environ.get("SSL_CERT_FILE")) as client:
            download(client, Remote(url, file.name, file.sha256, file.size), target, report)
        return Fetched(file.name, target, file.sha256)

    def every(self) -> Iterator[tuple[str, int, float]]:
        """(sha256, bytes, when it was put in seconds since the epoch) of every blob."""
        for found in self._objects.list("blobs/"):
            match = _KEY.fullmatch(found.key)
            if match is not None:
                yield match[1], found.size, found.modified

    def delete(self, digests: Sequence[str]) -> None:
        self._objects.delete([_key(sha256) for sha256 in digests])


def _key(sha256: str) -> str:
    return f"blobs/sha256-{sha256}"
