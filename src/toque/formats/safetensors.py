"""Reading safetensors files without trusting them: one file, or shards with an index.

A file is a 64-bit header length, a JSON header (name → dtype, shape, byte range) and the tensors' bytes. The header
is checked against the file's size and against itself; the bytes are mapped, not read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.folder import MAX_JSON, exists, inside, parse_object, read_json
from toque.formats.gguf import map_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_TENSORS = 100_000
MAX_DIMS = 8

_ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file; ``dtype`` is safetensors' spelling (``BF16``, ``F32`` …)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    buffer: mmap.mmap
    file: str

    def raw(self) -> npt.NDArray[np.uint8]:
        """Read-only bytes of shape (rows, bytes per row); rows is 1 for vectors."""
        view = np.frombuffer(self.buffer, np.uint8, self.nbytes, self.start)
        rows = math.prod(self.shape[:-1]) if len(self.shape) > 1 else 1
        return view.reshape(rows, -1)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder. With an index, exactly what it lists and no other file is opened."""
    if exists(folder, INDEX):
        return _read_sharded(folder)
    if exists(folder, SINGLE):
        return read_file(inside(folder, SINGLE, SINGLE), SINGLE)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(shards) == 1 and "-of-" not in shards[0]:
        return read_file(inside(folder, shards[0], shards[0]), shards[0])
    if shards:
        raise FormatError(
            f"is missing, and there are {len(shards)} safetensors files without it", field=INDEX
        )
    pickles = sorted(
        path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))
    )
    if pickles:
        raise UnsupportedModelError(
            f"{pickles[0]}: PyTorch pickle files can run code and are never loaded; convert to safetensors"
        )
    raise FormatError("the file is missing", field=SINGLE)


def _read_sharded(folder: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("must be an object that maps tensors to files", field=f"{INDEX}.weight_map")
    paths: dict[str, Path] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in paths:
            path = inside(folder, file, f"{INDEX}.weight_map[{_brief(tensor)}]")
            if not str(file).endswith(".safetensors"):
                raise FormatError(
                    f"{_brief(str(file))} is not a safetensors file",
                    field=f"{INDEX}.weight_map[{_brief(tensor)}]",
                )
            paths[file] = path
    for file, path in paths.items():
        if not path.exists():
            raise FormatError(f"the file is missing ({INDEX} lists it)", field=file)
    stored = {file: read_file(path, file) for file, path in paths.items()}
    tensors: dict[str, StoredTensor] = {}
    for tensor, file in weight_map.items():
        if tensor not in stored[file]:
            raise FormatError(f"{INDEX} says it is in {file}, but it is not", field=_brief(tensor))
        tensors[tensor] = stored[file][tensor]
    return tensors


def read_file(path: Path, name: str) -> dict[str, StoredTensor]:
    """Open and check one file. ``name`` is what messages call it."""
    buffer = map_file(path, name)
    size = len(buffer)
    if size < 8:
        raise FormatError(f"{size} bytes cannot hold a header length", field=name)
    length = int.from_bytes(buffer[:8], "little")
    if length > size - 8:
        raise FormatError(f"{length} bytes, but the file has {size - 8} left", field=f"{name}.header_length")
    if length > MAX_JSON:
        raise FormatError(
            f"{length} bytes is more than the {MAX_JSON} that Toque accepts", field=f"{name}.header_length"
        )
    header = parse_object(buffer[8 : 8 + length], f"{name}.header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise FormatError(
            f"{len(header)} tensors, more than the {MAX_TENSORS} accepted", field=f"{name}.header"
        )
    base = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for tensor, entry in header.items():
        field = f"{name}.header[{_brief(tensor)}]"
        dtype, shape, start, end = _entry(entry, size - base, field)
        tensors[tensor] = StoredTensor(tensor, dtype, shape, base + start, end - start, buffer, name)
    _check_cover(tensors, base, size, name)
    return tensors


def _entry(entry: Any, data_bytes: int, field: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise FormatError(f"must be an object, got {type(entry).__name__}", field=field)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{field}.dtype: {str(dtype)[:40]!a} is not a type that Toque knows")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(dim) for dim in shape):
        raise FormatError(f"must be a list of at most {MAX_DIMS} sizes", field=f"{field}.shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise FormatError("must be two byte positions", field=f"{field}.data_offsets")
    start, end = offsets
    if not start <= end <= data_bytes:
        raise FormatError(
            f"{start}..{end} is not inside the file's {data_bytes} bytes", field=f"{field}.data_offsets"
        )
    needed = _ITEM_BYTES[dtype]
    for dim in shape:
        needed *= dim  # Python integers do not wrap
    if needed != end - start:
        raise FormatError(f"{shape} of {dtype} do not take {end - start} bytes", field=f"{field}.shape")
    return dtype, tuple(shape), start, end


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _check_cover(tensors: Mapping[str, StoredTensor], base: int, size: int, name: str) -> None:
    """The format asks that the tensors fill the data exactly: no overlap, no hole, nothing behind."""
    position = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != position:
            what = "overlaps another tensor" if tensor.start < position else "leaves a hole before it"
            raise FormatError(what, field=f"{name}.header[{_brief(tensor.name)}].data_offsets")
        position += tensor.nbytes
    if position != size:
        raise FormatError(f"{size - position} bytes follow the last tensor", field=f"{name}.header")


def _brief(name: str) -> str:
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= 80 else shown[:77] + "..."
