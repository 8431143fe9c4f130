"""Taking the port: before anything slow, so that a wrong one is told at once."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.config import ServerSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(settings: ServerSettings, has_keys: bool) -> socket.socket:
    """The listening socket. ConfigError when the address is open to others without a key, or cannot be had."""
    host, port = settings.host, settings.port
    if host not in LOOPBACK and not has_keys and not settings.insecure:
        raise ConfigError(
            f"{host} can be reached from other machines: set an API key (--api-key, TOQUE_API_KEY), "
            "or say --insecure to serve without one",
            param="server.host",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}", param="server.port") from None
    listener.setblocking(False)
    return listener
