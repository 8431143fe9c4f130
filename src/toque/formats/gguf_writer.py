"""Writing GGUF files (version 3): metadata with its types, and tensors whose bytes are computed as they are written."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import TensorData
from toque.formats.gguf import MAGIC, ValueType
from toque.formats.strings import StringArray

ALIGNMENT = 32
_ROWS_BYTES = 8 << 20  # of a tensor that are in memory at a time
_SCALARS: Mapping[ValueType, str] = {
    ValueType.UINT8: "<B", ValueType.INT8: "<b", ValueType.UINT16: "<H", ValueType.INT16: "<h",
    ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.FLOAT32: "<f", ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q", ValueType.INT64: "<q", ValueType.FLOAT64: "<d",
}  # fmt: skip

Metadata = Mapping[str, tuple[ValueType, Any]]
"""A value and its type; of an array (numpy, `StringArray`, list of str), the type of its elements."""


def write_gguf(path: Path, metadata: Metadata, tensors: Sequence[TensorData]) -> None:
    """Write a whole file under a temporary name, then move it to ``path``: it is complete or not there.

    Tensors are written in the order of their stored rows (``row_order`` is how a reader undoes it).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            _write(file, metadata, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: BinaryIO, metadata: Metadata, tensors: Sequence[TensorData]) -> None:
    fixed = {key: value for key, value in metadata.items() if key != "general.alignment"}
    file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(fixed)))
    for key, (kind, value) in fixed.items():
        file.write(_string(key) + _value(kind, value))
    offset = 0
    for tensor in tensors:
        file.write(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        file.write(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        file.write(struct.pack("<IQ", BY_NAME[tensor.dtype].id, offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    for tensor in tensors:
        _pad(file)
        for part in tensor.parts or (tensor,):
            write_rows(file, part)
    _pad(file)


def write_rows(file: BinaryIO, tensor: TensorData) -> None:
    """A tensor's stored bytes, a few megabytes at a time."""
    rows, row_bytes = tensor.raw.shape
    step = max(1, _ROWS_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        file.write(np.ascontiguousarray(tensor.raw[start : start + step]).data)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: ValueType, value: Any) -> bytes:
    if isinstance(value, StringArray | list | tuple):
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + _strings(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + value.tobytes()
    packed = _string(value) if kind is ValueType.STRING else struct.pack(_SCALARS[kind], value)
    return struct.pack("<I", kind) + packed


def _strings(values: Iterable[str]) -> bytes:
    return b"".join(map(_string, values))
