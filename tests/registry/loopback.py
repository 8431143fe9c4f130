"""A package index and a model hub on loopback: what a pull sees of the world. Nothing here reaches the network."""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any


@dataclass
class Page:
    body: bytes
    content_type: str = "application/octet-stream"
    etag: str = ""
    ranges: bool = True


@dataclass
class Web:
    """Pages by path. ``cut`` closes the connection after so many bytes, for the next so many requests of a path."""

    pages: dict[str, Page] = field(default_factory=dict)
    gets: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    cut: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    delay_s: float = 0.0
    url: str = ""

    def add_wheel(self, project: str, version: str, members: dict[str, bytes], **page: Any) -> bytes:
        """A stored wheel on the index, with its page in JSON form; its bytes."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        data = buffer.getvalue()
        filename = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        digest = hashlib.sha256(data).hexdigest()
        self.pages[f"/files/{filename}"] = Page(data, **page)
        listing = {
            "meta": {"api-version": "1.0"},
            "name": project,
            "files": [{"filename": filename, "url": f"../../files/{filename}", "hashes": {"sha256": digest}}],
        }
        self.pages[f"/simple/{project}/"] = Page(
            json.dumps(listing).encode(), "application/vnd.pypi.simple.v1+json"
        )
        return data

    def wheel_gets(self) -> int:
        return sum(count for path, count in self.gets.items() if path.endswith(".whl"))


def handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            web.gets[path] += 1
            page = web.pages.get(path)
            statuses = web.status.get(path)
            if page is None or statuses:
                self.send_error(statuses.pop(0) if statuses else 404)
                return
            if web.delay_s and path.endswith(".whl"):
                time.sleep(web.delay_s)
            body, start = page.body, 0
            asked = self.headers.get("Range", "")
            condition = self.headers.get("If-Range")
            if asked and page.ranges and condition in (None, page.etag):
                web.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(body) - start))
            if page.etag:
                self.send_header("ETag", page.etag)
            self.end_headers()
            sent = body[start:]
            cuts = web.cut.get(path)
            if cuts:
                sent = sent[: cuts.pop(0)]
                self.close_connection = True
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
