"""The journal's file format, and reading it back.

::

    segment  = "TOQUEJ1\\n", number u64, record*, zeros        little-endian; of fixed size while it is written
    record   = length u32 (> 0), crc u32 of the payload, payload

The crc starts from the segment's number, so bytes of another segment never pass for records of this one.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"TOQUEJ1\n"
HEADER = len(MAGIC) + 8
FRAME = struct.Struct("<II")
MAX_PAYLOAD = 64 * 2**10
_NAME = re.compile(r"(\d{12})\.journal")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two records."""

    segment: int
    offset: int = HEADER


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}.journal"


def segments(folder: Path) -> list[int]:
    """The numbers of a folder's segments, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def header(number: int) -> bytes:
    return MAGIC + struct.pack("<Q", number)


def frame(number: int, payload: bytes) -> bytes:
    return FRAME.pack(len(payload), zlib.crc32(payload, number & 0xFFFFFFFF)) + payload


def records(data: bytes | memoryview, number: int, offset: int = 0) -> Iterator[tuple[int, memoryview]]:
    """``(end, payload)`` of each whole record from ``offset`` on, up to the first that is torn, or the zeros."""
    view = memoryview(data)
    seed = number & 0xFFFFFFFF
    while offset + FRAME.size <= len(view):
        length, crc = FRAME.unpack_from(view, offset)
        end = offset + FRAME.size + length
        if not 0 < length <= MAX_PAYLOAD or end > len(view):
            return
        payload = view[offset + FRAME.size : end]
        if zlib.crc32(payload, seed) != crc:
            return
        yield end, payload
        offset = end
