"""Models of the Hugging Face hub (or of whatever HF_ENDPOINT points to). The only place that imports its client."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toque.errors import DownloadError
from toque.registry.card import card_origin
from toque.registry.download import Remote, download, http_client
from toque.registry.names import HfRef
from toque.registry.progress import Report
from toque.registry.sources.base import Fetch, Fetched, chosen_files, plain, quantized_choice, wanted
from toque.registry.version import plain_json

_DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class _RepoFile:
    size: int | None
    sha256: str | None  # of files in large-file storage
    git_sha1: str | None  # of the others


def fetch_hf(reference: HfRef, work: Path, report: Report) -> Fetch:
    """The files that ``reference`` selects, all of one commit, each checked against the digest that the hub states."""
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    token, commit, card, files = _describe(reference, endpoint)
    origin = card_origin(card)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    fetched = []
    with http_client(os.environ.get("SSL_CERT_FILE")) as client:
        for name in choose(list(files), reference):
            known = files[name]
            # GGUF files may lie in a folder of the repository; a model's own files keep their place.
            kept = name.rsplit("/", 1)[-1] if name.endswith(".gguf") else name
            target = work / "files" / kept
            target.parent.mkdir(parents=True, exist_ok=True)
            url = f"{endpoint}/{reference.repository}/resolve/{commit}/{quote(name)}"
            remote = Remote(url, kept, known.sha256, known.size, headers)
            digest = download(client, remote, target, report)
            if known.sha256 is None and known.git_sha1 is not None and _git_sha1(target) != known.git_sha1:
                target.unlink()
                raise DownloadError(f"{kept}: its content is not what commit {commit[:12]} says")
            fetched.append(Fetched(kept, target, digest))
    resolved = str(replace(reference, revision=commit))
    return Fetch(tuple(fetched), revision=commit, license=origin.license, origin=origin, resolved=resolved)


def choose(names: list[str], reference: HfRef) -> list[str]:
    """A selected file or quantization; without one the safetensors model, or else the repository's usual GGUF."""
    if reference.selector and (reference.selector not in names or reference.selector.endswith(".gguf")):
        return quantized_choice(names, reference.selector, str(reference))
    if reference.selector:
        if not plain(reference.selector) or not wanted(reference.selector):
            raise DownloadError(f"{reference}: only GGUF and safetensors models can be pulled")
        return [reference.selector]
    return chosen_files(names, str(reference))


def _describe(
    reference: HfRef, endpoint: str
) -> tuple[str | None, str, dict[str, Any], Mapping[str, _RepoFile]]:
    """(token, commit, card, files) of a revision."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = get_token()
    try:
        info: Any = HfApi(endpoint=endpoint, token=token).model_info(
            reference.repository, revision=reference.revision, files_metadata=True
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "nothing")
        hint = (
            " (no such repository or revision, or it is private: set HF_TOKEN)"
            if status in (401, 403, 404)
            else ""
        )
        raise DownloadError(f"{reference}: the hub answered {status}{hint}") from error
    except Exception as error:
        # Its transport has been requests, httpx and httpx2, whose errors share no base: whatever it is, the hub's
        # description did not come.
        reason = f"{type(error).__name__}: {str(error)[:160]}"
        raise DownloadError(f"{reference}: the hub cannot be reached ({reason})") from error
    files = {}
    for sibling in info.siblings or ():
        lfs = sibling.lfs
        digest = None if lfs is None else (lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256)
        files[sibling.rfilename] = _RepoFile(sibling.size, digest, None if digest else sibling.blob_id)
    card: dict[str, Any] = {} if info.card_data is None else plain_json(info.card_data.to_dict())
    return token, str(info.sha), card, files


def _git_sha1(path: Path) -> str:
    sha = hashlib.sha1(usedforsecurity=False)
    sha.update(b"blob %d\0" % path.stat().st_size)
    sha.update(path.read_bytes())
    return sha.hexdigest()
