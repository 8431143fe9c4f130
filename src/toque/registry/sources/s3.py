"""Models in S3 or what speaks its protocol: an object, or the model files below a prefix.

Where the server is (AWS_ENDPOINT_URL), its region and the credentials come from the environment, as for AWS's tools.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import DownloadError
from toque.registry.download import Remote, download, http_client
from toque.registry.names import S3Ref
from toque.registry.object_store import ObjectStore, StoredObject
from toque.registry.progress import Report
from toque.registry.sources.base import (
    LINEAGE_FILES,
    Fetch,
    Fetched,
    chosen_files,
    plain,
    quantized_choice,
)
from toque.registry.training import read_origin
from toque.registry.version import NO_ORIGIN

if TYPE_CHECKING:
    import httpx

_MAX_LISTED = 10_000


def fetch_s3(reference: S3Ref, work: Path, report: Report) -> Fetch:
    """The object (with its other parts, if it is one of a split GGUF file), or the model files below the prefix."""
    objects = ObjectStore(f"s3://{reference.bucket}")
    folder, _, name = reference.key.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    listed = _listed(objects, prefix, reference)
    if name and name not in listed:
        raise DownloadError(f"{reference}: there is no such object (for all below it, end it in '/')")
    if name:
        chosen = quantized_choice(list(listed), name, str(reference)) if name.endswith(".gguf") else [name]
    else:
        chosen = chosen_files(list(listed), str(reference))
    about = [] if name else sorted(LINEAGE_FILES & listed.keys())
    with http_client(os.environ.get("SSL_CERT_FILE")) as client:
        files = _brought(client, objects, [listed[name] for name in chosen], prefix, work / "files", report)
        _brought(client, objects, [listed[name] for name in about], prefix, work / "origin", report)
    origin = read_origin(work / "origin") if about else NO_ORIGIN
    etags = ",".join(listed[name].etag.strip('"') for name in chosen)
    return Fetch(tuple(files), revision=etags[:200], origin=origin)


def _listed(objects: ObjectStore, prefix: str, reference: S3Ref) -> dict[str, StoredObject]:
    """Objects below a prefix by their names from there on; names that are no plain path are left out."""
    listed: dict[str, StoredObject] = {}
    for found in objects.list(prefix):
        name = found.key.removeprefix(prefix)
        if plain(name):
            listed[name] = found
        if len(listed) > _MAX_LISTED:
            raise DownloadError(
                f"{reference}: there are more than {_MAX_LISTED} objects; name a longer prefix"
            )
    return listed


def _brought(
    client: httpx.Client,
    objects: ObjectStore,
    wanted: Iterable[StoredObject],
    prefix: str,
    folder: Path,
    report: Report,
) -> list[Fetched]:
    files = []
    for found in wanted:
        name = found.key.removeprefix(prefix)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        remote = Remote(objects.signed_url(found.key), name, size=found.size)
        files.append(Fetched(name, target, download(client, remote, target, report)))
    return files
