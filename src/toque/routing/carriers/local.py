"""Frames over a Unix socket: the carrier between processes of one machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from toque.errors import WireError
from toque.proto.frames import MAX_TO_CLIENT, PREFACE, FrameDecoder, encode_frame

if TYPE_CHECKING:
    from toque.routing.carriers import Link, Listener


async def connect_local(path: str, listener: Listener) -> Link:
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: _LocalLink(listener), path)
    return link


class _LocalLink(asyncio.Protocol):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._decoder = FrameDecoder(MAX_TO_CLIENT)
        self._transport: asyncio.Transport | None = None
        self._why = "the replica closed the session"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(PREFACE)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._decoder.feed(data):
                self._listener.received(payload)
        except WireError as error:
            self._why = error.message
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._listener.lost(f"{self._why} ({exc})" if exc is not None else self._why)

    def send(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(payload))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
