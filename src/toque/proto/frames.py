"""Length-prefixed frames over a byte stream: how a local session carries its messages.

::

    connection = PREFACE frame*      (the preface from the connecting side only)
    frame      = length (u32, little endian) payload

Without I/O: bytes go in, whole payloads come out. A peer that sends anything else is recognised within its
first eight bytes, and a length over the bound before anything is allocated for it.
"""

from __future__ import annotations

import struct

from toque.errors import WireError

PREFACE = b"TOQUE/1\n"
# A prompt takes 4 bytes a token, so four million fit; answers may hold 20 logprobs per prompt token.
MAX_TO_REPLICA = 16 << 20
MAX_TO_CLIENT = 64 << 20

_LENGTH = struct.Struct("<I")


def encode_frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into payloads, however the stream arrives in pieces.

    After a WireError the stream has no meaning any more: close the connection.
    """

    def __init__(self, limit: int, *, preface: bytes = b"") -> None:
        self._limit = limit
        self._preface = preface
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The payloads completed by ``data``. Raises WireError for a bad preface or length."""
        buffer = self._buffer
        buffer += data
        if self._preface:
            got = bytes(buffer[: len(self._preface)])
            if not self._preface.startswith(got):
                raise WireError(f"the connection starts with {got!r} instead of {self._preface!r}")
            if len(got) < len(self._preface):
                return []
            del buffer[: len(got)]
            self._preface = b""
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self._limit:
                raise WireError(f"a message of {length} bytes is over the bound of {self._limit}")
            end = start + 4 + length
            if len(buffer) < end:
                break
            payloads.append(bytes(memoryview(buffer)[start + 4 : end]))
            start = end
        if start:
            del buffer[:start]
        return payloads
