"""A streaming HTTP client that costs little: the load generator shares its cores with the server it measures.

One connection per request, HTTP/1.1 parsed by httptools, server-sent events split by hand; only the time of each
event with text is kept, and the usage of the last one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from toque.errors import ConfigError


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are `time.perf_counter` seconds."""

    sent: float
    first: float = 0.0  # first event with text
    done: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every event with text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.status == 200


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    path: str
    model: str
    key: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str, model: str, key: str = "") -> Target:
        """From an address with or without ``http://`` and ``/v1``. Raises ConfigError for one that is none."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be like http://host:port, got {url[:80]!r}", param="url")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        path = f"{base}/v1/chat/completions"
        return cls(parts.hostname, port or (443 if tls else 80), path, model, key, tls)


class _Response(asyncio.Protocol):
    """Parses one response and notes when each event arrived."""

    def __init__(self, record: Record, request: bytes) -> None:
        self.record = record
        self.request = request
        self.parser = httptools.HttpResponseParser(self)
        self.pending = b""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"bad HTTP from the server: {error}")

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        status = self.parser.get_status_code()
        self.pending += body
        if status != 200:
            return
        *events, self.pending = self.pending.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            return
        body: dict[str, Any] = msgspec.json.decode(event[6:])
        if "error" in body:
            self._finish(str(body["error"].get("message", body["error"])))
            return
        record = self.record
        usage = body.get("usage")
        if usage:
            record.prompt_tokens = usage["prompt_tokens"]
            record.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens") or 0
        if any(choice["delta"].get("content") for choice in body["choices"]):
            if not record.arrivals:
                record.first = now
            record.arrivals.append(now)

    def on_message_complete(self) -> None:
        self.record.status = self.parser.get_status_code()
        self._finish("" if self.record.status == 200 else self.pending.decode(errors="replace")[:200])

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("the server closed the connection before the answer ended")

    def _finish(self, error: str) -> None:
        if not self.finished.done():
            self.record.done = time.perf_counter()
            self.record.error = error
            self.finished.set_result(None)
            if self.transport is not None:
                self.transport.close()


async def chat(target: Target, prompt: str, output_tokens: int, *, timeout_s: float = 600.0) -> Record:
    """Send one streamed chat; failures are told in the record, never raised."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    if target.key:
        head += f"Authorization: Bearer {target.key}\r\n"
    record = Record(time.perf_counter())
    loop = asyncio.get_running_loop()
    try:
        _, protocol = await loop.create_connection(
            lambda: _Response(record, head.encode() + b"\r\n" + body),
            target.host,
            target.port,
            ssl=target.tls or None,
        )
        await asyncio.wait_for(asyncio.shield(protocol.finished), timeout_s)
    except (OSError, TimeoutError) as error:
        record.done = time.perf_counter()
        record.error = str(error) or type(error).__name__
    return record
