"""Writing safetensors: one file, or shards with an index; bytes are computed as they are written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toque.formats.safetensors import INDEX, SINGLE

SHARD_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class NewTensor:
    """``chunks`` yields the bytes in order, ``nbytes`` in all, when the file is written."""

    name: str
    dtype: str  # safetensors' spelling
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[npt.NDArray[np.uint8]]]


def write_folder(folder: Path, tensors: Sequence[NewTensor], shard_bytes: int = SHARD_BYTES) -> None:
    """``model.safetensors``, or numbered shards and their index when the whole is larger than ``shard_bytes``."""
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: Sequence[NewTensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    with open(path, "wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        for tensor in tensors:
            for chunk in tensor.chunks():
                file.write(np.ascontiguousarray(chunk).data)
        file.flush()
        os.fsync(file.fileno())
