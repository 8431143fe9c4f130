"""A real S3 server (moto's) on loopback, in front of which requests can be refused, delayed, cut off or altered."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class S3:
    """``busy`` answers the next so many requests of a method with 503. ``cut`` sends so many bytes of the next whole
    GETs, ``alter`` changes what is read. ``requests`` counts what arrived, by method and the key's last part."""

    url: str = ""
    busy: Counter[str] = field(default_factory=Counter)
    cut: list[int] = field(default_factory=list)
    alter: Callable[[bytes], bytes] | None = None
    down: bool = False
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)

    def application(self, inner: Any) -> Any:
        def call(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].rsplit("/", 1)[-1]
            self.requests[method, key] += 1
            if self.down or self.busy[method] > 0:
                self.busy[method] -= 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
            if method == "GET" and environ.get("HTTP_RANGE"):
                self.ranges.append(environ["HTTP_RANGE"])
            if method != "GET" or "list-type" in environ.get("QUERY_STRING", ""):
                return inner(environ, start)
            body = b"".join(inner(environ, start))
            if self.alter is not None:
                body = self.alter(body)
            return [body[: self.cut.pop(0)]] if self.cut else [body]

        return call


@contextmanager
def s3_server(bucket: str) -> Iterator[S3]:
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            pass

    world = S3()
    inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, world.application(inner), threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    world.url = f"http://127.0.0.1:{server.server_port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=world.url, **keys).create_bucket(Bucket=bucket)
    yield world
    server.shutdown()
    server.server_close()
    thread.join()
