"""The session as a gRPC stream. The one place on the client's side that imports grpc."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from toque.proto.frames import MAX_TO_CLIENT, MAX_TO_REPLICA

if TYPE_CHECKING:
    from toque.routing.carriers import Link, Listener

SESSION = "/toque.replica.v1.Replica/Session"
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_TO_CLIENT),
    ("grpc.max_send_message_length", MAX_TO_REPLICA),
]
CONNECT_TIMEOUT_S = 5.0


async def connect_grpc(target: str, listener: Listener) -> Link:
    channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except TimeoutError:
        await channel.close(None)
        raise ConnectionRefusedError(f"no gRPC server answers at {target}") from None
    return _GrpcLink(channel, listener)


class _GrpcLink:
    def __init__(self, channel: grpc.aio.Channel, listener: Listener) -> None:
        self._channel = channel
        self._listener = listener
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        session = channel.stream_stream(
            SESSION, request_serializer=None, response_deserializer=None
        )  # bytes already
        self._call = session(self._sent())
        self._task = asyncio.ensure_future(self._run())

    def send(self, payload: bytes) -> None:
        self._outbox.put_nowait(payload)

    def close(self) -> None:
        self._outbox.put_nowait(None)
        self._call.cancel()

    async def _sent(self) -> AsyncIterator[bytes]:
        while (payload := await self._outbox.get()) is not None:
            yield payload

    async def _run(self) -> None:
        why = "the replica closed the session"
        try:
            async for payload in self._call:
                self._listener.received(payload)
        except grpc.aio.AioRpcError as error:
            why = error.details() or str(error.code())
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            why = "the session was closed"
        finally:
            self._outbox.put_nowait(None)
            self._listener.lost(why)
            await self._channel.close(None)
