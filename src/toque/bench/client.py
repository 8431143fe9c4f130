"""A streaming HTTP client that costs little: the load generator shares its cores with the server it measures.

One connection per request, HTTP/1.1 parsed by httptools, server-sent events split by hand; only the time of each
event with text is kept, and the usage of the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from toque.errors import ConfigError

Endpoint = Literal["chat", "completions"]
_PATHS: dict[Endpoint, str] = {"chat": "chat/completions", "completions": "completions"}


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are `time.perf_counter` seconds.

    Latencies count from ``planned``, the moment the request was due: one that had to wait in this client is slow,
    not left out. In a closed loop a request is due when it is sent.
    """

    planned: float
    sent: float
    first: float = 0.0  # first event with text
    done: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every event with text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    from_usage: bool = False  # else the tokens are the events with text, and the prompt's are unknown
    status: int = 0
    kind: str = ""  # of failure, see `report.Report.errors`; empty for a request that was answered
    error: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.kind

    @property
    def ttft(self) -> float | None:
        """Seconds until the first text; None for an answer without any."""
        return self.first - self.planned if self.arrivals else None

    @property
    def e2e(self) -> float:
        """Seconds until the answer's last byte."""
        return self.done - self.planned

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.completion_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what each carries besides its prompt."""

    host: str
    port: int
    base: str  # the path before the endpoint's name, like /v1/
    model: str
    key: str = ""
    tls: bool = False
    endpoint: Endpoint = "chat"
    ignore_eos: bool = True
    ask_usage: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # merged into every body

    @classmethod
    def parse(cls, url: str, model: str, key: str = "", **options: Any) -> Target:
        """From an address with or without ``http://`` and ``/v1``. Raises ConfigError for one that is none."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like http://host:port, got {url[:80]!r}", param="url")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1") + "/v1/"
        return cls(parts.hostname, port or (443 if tls else 80), base, model, key, tls, **options)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"

    def request(self, messages: Sequence[dict[str, Any]], output_tokens: int) -> bytes:
        """A whole HTTP request. For `completions` the prompt is the only message's text."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.endpoint == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = messages[0]["content"]
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.ask_usage:
            body["stream_options"] = {"include_usage": True}
        data = msgspec.json.encode(body | self.extra)
        head = (
            f"POST {self.base}{_PATHS[self.endpoint]} HTTP/1.1\r\nHost: {self.authority}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
        )
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        return head.encode() + b"\r\n" + data


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # of a completion


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    """What is read of an event; decoding skips the rest."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Response(asyncio.Protocol):
    """Parses one response and notes when each event arrived."""

    def __init__(self, record: Record, request: bytes, keep_text: bool) -> None:
        self.record = record
        self.request = request
        self.keep_text = keep_text
        self.parser = httptools.HttpResponseParser(self)
        self.pending = b""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is not derived from it
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._finish("protocol", f"bad HTTP from the server: {error.__context__ or error}")

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        self.pending += body
        if self.parser.get_status_code() != 200:
            return
        *lines, self.pending = self.pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self._finish("protocol", f"bad event from the server: {error}: {data[:80]!r}")
            return
        if event.error is not None:
            told = event.error.get("message") if isinstance(event.error, dict) else None
            self._finish("stream", str(told or event.error)[:200])
            return
        record = self.record
        if usage := event.usage:
            record.prompt_tokens = usage.prompt_tokens
            record.completion_tokens = usage.completion_tokens
            record.from_usage = True
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            delta = choice.delta
            content = choice.text if delta is None else delta.content
            if content or (delta and (delta.reasoning_content or delta.reasoning or delta.tool_calls)):
                if not record.arrivals:
                    record.first = now
                record.arrivals.append(now)
                if self.keep_text and content:
                    record.text += content

    def on_message_complete(self) -> None:
        self.record.status = self.parser.get_status_code()
        if self.record.status == 200:
            self._finish("", "")
        else:
            self._finish(f"HTTP {self.record.status}", self.pending.decode(errors="replace")[:200])

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("closed", "the server closed the connection before the answer ended")

    def _finish(self, kind: str, error: str) -> None:
        if self.finished.done():
            return
        record = self.record
        record.done = time.perf_counter()
        record.kind, record.error = kind, error
        if not record.from_usage:
            record.completion_tokens = len(record.arrivals)
        self.finished.set_result(None)
        if self.transport is not None:
            self.transport.close()


async def send(
    target: Target,
    messages: Sequence[dict[str, Any]],
    output_tokens: int,
    *,
    planned: float | None = None,
    keep_text: bool = False,
    timeout_s: float = 600.0,
) -> Record:
    """Send one streamed request; failures are told in the record, never raised."""
    request = target.request(messages, output_tokens)
    sent = time.perf_counter()
    record = Record(sent if planned is None else planned, sent)
    loop = asyncio.get_running_loop()
    protocol: _Response | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, protocol = await loop.create_connection(
                lambda: _Response(record, request, keep_text),
                target.host,
                target.port,
                ssl=target.tls or None,
            )
            await protocol.finished
    except TimeoutError:
        record.kind, record.error = "timeout", f"no complete answer after {timeout_s:g} s"
    except OSError as error:
        record.kind, record.error = "connect", str(error) or type(error).__name__
    finally:
        if protocol is not None and protocol.transport is not None:
            protocol.transport.abort()
    record.done = record.done or time.perf_counter()
    return record


async def chat(target: Target, prompt: str, output_tokens: int, *, timeout_s: float = 600.0) -> Record:
    """Send one prompt of a user."""
    return await send(target, [{"role": "user", "content": prompt}], output_tokens, timeout_s=timeout_s)
