"""What every file format is turned into: a configuration and named tensors whose bytes stay in the mapped file.

Tensor names are GGUF's (``token_embd.weight``, ``blk.0.attn_q.weight`` …) whatever the source was, norm weights are
ready to multiply with (gemma's +1 is applied), and rotary halves are laid out as Hugging Face does (first half,
second half): ``row_order`` undoes the interleaving that GGUF's llama files apply to q and k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.types import ModelConfig

Bytes = npt.NDArray[np.uint8]

_CHUNK_BYTES = 1 << 20  # of converted rows at a time, which bounds the temporaries of a conversion


class ConvertedRows:
    """Rows of bytes that are computed when they are asked for: weights stored in a layout that is not GGML's.

    Stands where `TensorData.raw` is an array: `numpy.asarray` computes the rows, a slice of rows costs nothing, and
    nothing is kept. ``convert(first, last)`` returns uint8 (last - first, row_bytes).
    """

    def __init__(
        self, rows: int, row_bytes: int, convert: Callable[[int, int], Bytes], first: int = 0
    ) -> None:
        self.shape = (rows, row_bytes)
        self.nbytes = rows * row_bytes
        self._convert = convert
        self._first = first

    def __getitem__(self, rows: slice) -> ConvertedRows:
        first, last, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"rows are cut in steps of 1, not {step}")
        return ConvertedRows(max(last - first, 0), self.shape[1], self._convert, self._first + first)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Bytes:
        if copy is False or (dtype is not None and np.dtype(dtype) != np.uint8):
            raise ValueError("converted rows are always fresh arrays of uint8")
        rows, row_bytes = self.shape
        out = np.empty(self.shape, np.uint8)
        step = max(32, _CHUNK_BYTES // max(row_bytes, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[start:stop] = self._convert(self._first + start, self._first + stop)
        return out


@dataclass(frozen=True, slots=True)
class TensorData:
    """One tensor. ``dtype`` is a GGML type name (``F32``, ``BF16``, ``Q4_1`` …), ``shape`` is (rows, columns) or (n,).

    ``raw`` is a read-only uint8 view of shape (rows, bytes per row) into the mapped file (rows is 1 for vectors), or
    `ConvertedRows` of that shape, which numpy turns into an array: pass it through `numpy.ascontiguousarray`.
    ``row_order``, when present, lists the source row of each logical row. ``column_order`` lists the logical column of
    each stored one (act-order: columns that share a scale lie together): who multiplies with the matrix as it is stored
    takes the values in that order. Only matrices of linear layers have one, and
    of an expert gate and up, which share it.

    A layer's experts are one tensor of shape (experts, rows, columns), ``raw`` with experts * rows rows. Where they lie
    apart in the file, ``parts`` has a matrix for each and ``raw`` is empty.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: Bytes | ConvertedRows
    row_order: npt.NDArray[np.int64] | None = None
    parts: tuple[TensorData, ...] = ()
    column_order: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes) + sum(part.nbytes for part in self.parts)

    def experts(self) -> tuple[TensorData, ...]:
        """A tensor of three dimensions as one matrix per expert; nothing is read or copied."""
        count, rows, columns = self.shape
        return self.parts or tuple(
            TensorData(f"{self.name}[{i}]", self.dtype, (rows, columns), self.raw[i * rows : (i + 1) * rows])
            for i in range(count)
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that has been read and checked but not loaded. The files stay open while it lives.

    ``metadata`` is the GGUF key/value table, or ``{}``: Python scalars, numpy arrays for arrays of numbers, and
    `toque.formats.strings.StringArray` for arrays of strings. ``folder`` is the safetensors folder, or None.
    """

    path: Path
    format: str  # "gguf" or "safetensors"
    config: ModelConfig
    tensors: Mapping[str, TensorData]
    quantization: str  # the dominant weight type, for people
    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(t.shape)) for t in self.tensors.values())
