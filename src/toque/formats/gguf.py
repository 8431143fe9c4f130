"""Reading GGUF files (versions 2 and 3, little-endian) without trusting them.

The file is memory-mapped and parsed in one pass. Every count, length and offset is checked against what the file can
hold before it is used, nothing is allocated by a number the file merely claims, and each refusal is a FormatError
whose field says where: ``header.version``, ``metadata[general.alignment]``, ``tensor[3].offset``.

Long string arrays (a tokenizer's tokens and merges) are walked and checked at open, but become Python strings only
when somebody reads them; see `toque.formats.strings`.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.blocks import BY_ID, BlockType
from toque.formats.strings import StringArray, read_strings

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 65_536
MAX_TENSORS = 100_000
MAX_STRING = 16 << 20  # bytes of one string; chat templates are about 2^14
MAX_NAME = 256  # bytes of a tensor name
MAX_KEY = 65_535
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's description. ``dims`` is in GGUF's order, fastest first; ``start`` counts from the file's start."""

    name: str
    type: BlockType
    dims: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One open GGUF file whose description has been checked completely.

    ``metadata`` holds Python scalars, numpy views for numeric arrays and `StringArray`; ``types`` the type of each
    key (of an array's elements). The mapping lives as long as a view into it does.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    types: Mapping[str, ValueType]
    tensors: Mapping[str, TensorEntry]
    buffer: mmap.mmap

    def bytes_of(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only view of shape (rows, bytes per row) into the mapped file."""
        view = np.frombuffer(self.buffer, dtype=np.uint8, count=entry.nbytes, offset=entry.start)
        return view.reshape(-1, entry.type.row_bytes(entry.dims[0]))


def map_file(path: Path, name: str = "") -> mmap.mmap:
    """Map a regular file read-only. A FIFO, a device or a folder is refused without waiting on it.

    ``name`` is what a FormatError calls the file; the path's last part by default.
    """
    name = name or path.name
    try:
        # Checked before opening, because opening a FIFO or a device can block or have effects …
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError("is not a regular file", field=name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # … and again after, because the name may point elsewhere by now.
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError("is not a regular file", field=name)
            if status.st_size == 0:
                raise FormatError("is empty", field=name)
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FormatError(f"cannot be opened: {reason}", field=name) from error


def read_gguf(path: Path) -> GGUFFile:
    """Open and check one GGUF file. Reads the header, the metadata and the tensor table; no weight.

    Raises FormatError naming the field, or UnsupportedModelError for a tensor type whose size is not known.
    """
    buffer = map_file(path)
    cursor = _Cursor(buffer)
    magic = cursor.take(4, "header.magic")
    if magic != MAGIC:
        raise FormatError(f"expected {MAGIC!r}, got {magic!r}: not a GGUF file", field="header.magic")
    version = cursor.u32("header.version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = " (a big-endian file)" if swapped in VERSIONS else ""
        raise FormatError(f"version {version} is not one of 2, 3{hint}", field="header.version")
    n_tensors = cursor.count("header.tensor_count", smallest=8 + 1 + 4 + 8 + 4 + 8, limit=MAX_TENSORS)
    n_metadata = cursor.count("header.metadata_kv_count", smallest=8 + 1 + 4 + 1, limit=MAX_METADATA)
    metadata, types = _read_metadata(cursor, n_metadata)
    alignment = _alignment(metadata, types)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    return GGUFFile(path, version, metadata, types, tensors, buffer)


class _Cursor:
    """A position in the file; each read says which field it is for and checks that the file still has it."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def take(self, nbytes: int, field: str) -> bytes:
        end = self.position + nbytes
        if end > self.size:
            raise FormatError(
                f"needs {nbytes} bytes at {self.position}, but the file ends at {self.size}", field=field
            )
        data = self.buffer[self.position : end]
        self.position = end
        return data

    def u32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.take(8, field), "little")

    def count(self, field: str, *, smallest: int, limit: int) -> int:
        """A u64 count of things that take at least ``smallest`` bytes each."""
        value = self.u64(field)
        if value > limit:
            raise FormatError(f"{value} is more than the {limit} that Toque accepts", field=field)
        if value * smallest > self.size:
            raise FormatError(f"{value} cannot fit into a file of {self.size} bytes", field=field)
        return value

    def text(self, field: str, limit: int) -> str:
        length = self.u64(f"{field}.length")
        if length > self.size - self.position:
            left = self.size - self.position
            raise FormatError(f"{length} bytes, but the file has {left} left", field=f"{field}.length")
        if length > limit:
            raise FormatError(
                f"{length} bytes is more than the {limit} that Toque accepts", field=f"{field}.length"
            )
        try:
            return self.take(length, field).decode()
        except UnicodeDecodeError as error:
            raise FormatError(_not_utf8(error), field=field) from None


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, ValueType]]:
    values: dict[str, Any] = {}
    types: dict[str, ValueType] = {}
    for index in range(count):
        key = cursor.text(f"metadata[{index}].key", MAX_KEY)
        if not key:
            raise FormatError("is empty", field=f"metadata[{index}].key")
        field = f"metadata[{_brief(key)}]"
        if key in values:
            raise FormatError("appears twice", field=field)
        kind = _value_type(cursor.u32(f"{field}.type"), f"{field}.type")
        if kind is ValueType.STRING:
            values[key] = cursor.text(field, MAX_STRING)
        elif kind is ValueType.ARRAY:
            kind, values[key] = _read_array(cursor, field)
        else:
            dtype = _DTYPES[kind]
            raw = cursor.take(dtype.itemsize, field)
            if kind is ValueType.BOOL and raw > b"\x01":
                raise FormatError(f"a bool must be 0 or 1, got {raw[0]}", field=field)
            values[key] = np.frombuffer(raw, dtype=dtype)[0].item()
        types[key] = kind
    return values, types


def _value_type(number: int, field: str) -> ValueType:
    try:
        return ValueType(number)
    except ValueError:
        raise FormatError(f"{number} is not a metadata type", field=field) from None


def _read_array(cursor: _Cursor, field: str) -> tuple[ValueType, StringArray | npt.NDArray[Any]]:
    kind = _value_type(cursor.u32(f"{field}.type"), f"{field}.type")
    if kind is ValueType.ARRAY:
        raise FormatError("arrays of arrays are not accepted", field=field)
    count = cursor.u64(f"{field}.length")
    if kind is ValueType.STRING:
        strings, cursor.position = read_strings(cursor.buffer, cursor.position, count, field)
        return kind, strings
    dtype = _DTYPES[kind]
    left = cursor.size - cursor.position
    if count * dtype.itemsize > left:
        raise FormatError(
            f"{count} elements of {dtype.itemsize} bytes, but the file has {left} left",
            field=f"{field}.length",
        )
    if kind is ValueType.BOOL:
        # Read as bytes first: a numpy bool that holds 2 is undefined behaviour waiting to happen.
        raw = np.frombuffer(cursor.buffer, dtype=np.uint8, count=count, offset=cursor.position)
        if count and raw.max() > 1:
            raise FormatError(f"a bool must be 0 or 1, got {raw.max()}", field=field)
    array = np.frombuffer(cursor.buffer, dtype=dtype, count=count, offset=cursor.position)
    cursor.position += count * dtype.itemsize
    return kind, array


def _alignment(metadata: Mapping[str, Any], types: Mapping[str, ValueType]) -> int:
    field = "metadata[general.alignment]"
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT
    value, kind = metadata["general.alignment"], types["general.alignment"]
    if kind is not ValueType.UINT32 or not isinstance(value, int):
        raise FormatError(f"must be a UINT32, got {kind.name}", field=field)
    if value < 8 or value & (value - 1):
        raise FormatError(f"{value} is not a power of two of at least 8", field=field)
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    described: list[tuple[str, BlockType, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for index in range(count):
        field = f"tensor[{index}]"
        name = cursor.text(f"{field}.name", MAX_NAME)
        if not name:
            raise FormatError("is empty", field=f"{field}.name")
        if name in names:
            raise FormatError(f"{_brief(name)} appears twice", field=f"{field}.name")
        names.add(name)
        n_dims = cursor.u32(f"{field}.n_dims")
        if not 1 <= n_dims <= MAX_DIMS:
            raise FormatError(
                f"{_brief(name)}: must be 1 to {MAX_DIMS}, got {n_dims}", field=f"{field}.n_dims"
            )
        dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, f"{field}.dims"))
        type_id = cursor.u32(f"{field}.type")
        offset = cursor.u64(f"{field}.offset")
        if type_id not in BY_ID:
            raise UnsupportedModelError(
                f"{field}.type: {_brief(name)} has type {type_id}, which Toque does not know"
            )
        block = BY_ID[type_id]
        nbytes = _tensor_bytes(block, dims, name, f"{field}.dims", cursor.size)
        described.append((name, block, dims, offset, nbytes))
    base = -(-cursor.position // alignment) * alignment
    _check_places(described, base, cursor.size, alignment)
    return {
        name: TensorEntry(name, block, dims, base + offset, nbytes)
        for name, block, dims, offset, nbytes in described
    }


def _tensor_bytes(block: BlockType, dims: tuple[int, ...], name: str, field: str, file_size: int) -> int:
    if 0 in dims:
        raise FormatError(f"{_brief(name)}: a dimension is 0 in {list(dims)}", field=field)
    if dims[0] % block.elements:
        raise FormatError(
            f"{_brief(name)}: rows of {dims[0]} are not whole {block.name} blocks of {block.elements}",
            field=field,
        )
    nbytes = block.row_bytes(dims[0])
    for dim in dims[1:]:
        nbytes *= dim  # Python integers do not wrap
    if nbytes > file_size:
        raise FormatError(
            f"{_brief(name)}: {list(dims)} {block.name} is {nbytes} bytes, the file only {file_size}",
            field=field,
        )
    return nbytes


def _check_places(
    described: list[tuple[str, BlockType, tuple[int, ...], int, int]], base: int, size: int, alignment: int
) -> None:
    """Every tensor aligned, inside the file, and in nobody else's place."""
    for index, (name, _, _, offset, nbytes) in enumerate(described):
        field = f"tensor[{index}].offset"
        if offset % alignment:
            raise FormatError(f"{_brief(name)}: {offset} is not a multiple of {alignment}", field=field)
        if base + offset + nbytes > size:
            raise FormatError(
                f"{_brief(name)}: {nbytes} bytes at {base + offset} end past the file's {size}", field=field
            )
    order = sorted(range(len(described)), key=lambda i: described[i][3])
    for before, after in pairwise(order):
        if described[before][3] + described[before][4] > described[after][3]:
            first, second = _brief(described[before][0]), _brief(described[after][0])
            raise FormatError(f"{second} overlaps {first}", field=f"tensor[{after}].offset")


def _brief(name: str) -> str:
    """A name from the file, made safe for a message: printable, and no longer than a line."""
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start})"
