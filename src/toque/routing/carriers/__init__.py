"""How a session's messages reach a replica: framed over a Unix socket, or as gRPC.

A carrier moves whole payloads (serialized messages) and knows nothing of their meaning.
"""

from __future__ import annotations

from typing import Protocol

GRPC_PREFIX = (
    "grpc+"  # an address with it, as in grpc+unix:/run/toque/a.grpc, is gRPC's; else it is a socket path
)


class Link(Protocol):
    """An open connection to one replica. Sending never blocks and never fails: a lost link says so once."""

    def send(self, payload: bytes) -> None: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """What a link reports to. ``lost`` is called exactly once, also after ``close``."""

    def received(self, payload: bytes) -> None: ...

    def lost(self, why: str) -> None: ...


async def connect(address: str, listener: Listener) -> Link:
    """Opens a link. Raises OSError while nobody listens at the address."""
    if address.startswith(GRPC_PREFIX):
        from toque.routing.carriers.grpc import connect_grpc

        return await connect_grpc(address.removeprefix(GRPC_PREFIX), listener)
    from toque.routing.carriers.local import connect_local

    return await connect_local(address, listener)
