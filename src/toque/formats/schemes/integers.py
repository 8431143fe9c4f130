"""Integer weights with a scale for each run of columns, as the GGML type that holds them.

A weight is ``scale * (code - zero)``. Where every 32 columns in a row share a group, the codes go into GGML's blocks
as they are and each block repeats its group's scale, rounded to float16 (as is ``-scale * zero`` in Q4_1):

====  ==============================  =====
bits  zero                            type
====  ==============================  =====
4     8 everywhere (symmetric)        Q4_0
4     any                             Q4_1
8     128 everywhere (symmetric)      Q8_0
8     any                             Q8_Z
====  ==============================  =====

Q8_Z is ours: blocks of 32 weights with scale and zero in float16, which is exact, and the codes as they are.

Columns whose groups are scattered (act-order) are stored sorted by group, and the order goes with them.

F16 is the weight itself, rounded once: for groups that are no multiple of 32 even when sorted, and for scattered
columns where no reader can follow their order (an embedding table).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError
from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Bytes, ConvertedRows
from toque.formats.schemes.base import Float32, Matrix

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """How to read rows ``first:last`` of a weight of ``shape`` (rows, columns).

    ``codes`` gives unsigned codes uint8 (n, columns), ``scales`` float32 (n, groups), ``zeros`` the same or None when
    symmetric. ``groups`` is the group of each column, or None when each is ``group_size`` columns in order.
    """

    field: str  # for messages
    bits: int
    shape: tuple[int, int]
    group_size: int
    codes: Callable[[int, int], Bytes]
    scales: Callable[[int, int], Float32]
    zeros: Callable[[int, int], npt.NDArray[Any]] | None = None
    groups: npt.NDArray[np.int64] | None = None

    def matrix(self, *, sortable: bool = False) -> Matrix:
        """``sortable``: the matrix may be given with a ``column_order``."""
        rows, columns = self.shape
        order = None if self.groups is None else np.argsort(self.groups, kind="stable")
        kind = self._type(order, sortable)
        size = BY_NAME[kind].row_bytes(columns)
        if kind == "F16":
            return Matrix(kind, self.shape, ConvertedRows(rows, size, self._floats))
        return Matrix(kind, self.shape, ConvertedRows(rows, size, partial(self._blocks, order=order)), order)

    def _type(self, order: npt.NDArray[np.int64] | None, sortable: bool) -> str:
        if self.shape[1] % _BLOCK or not self._whole_blocks(order, sortable):
            return "F16"
        if self.zeros is None:
            return "Q4_0" if self.bits == 4 else "Q8_0"
        return "Q4_1" if self.bits == 4 else "Q8_Z"

    def _whole_blocks(self, order: npt.NDArray[np.int64] | None, sortable: bool) -> bool:
        if self.groups is None or order is None:
            return self.group_size % _BLOCK == 0
        by_block = self.groups[order].reshape(-1, _BLOCK)
        return sortable and bool((by_block == by_block[:, :1]).all())

    def _blocks(self, first: int, last: int, *, order: npt.NDArray[np.int64] | None) -> Bytes:
        codes = self.codes(first, last)
        if self.groups is None or order is None:
            group = np.arange(0, self.shape[1], _BLOCK) // self.group_size
        else:
            group, codes = self.groups[order[::_BLOCK]], np.take(codes, order, axis=1)
        scales = self.scales(first, last)[:, group]
        if self.zeros is None:
            if self.bits == 8:
                return pack_q8(codes ^ np.uint8(0x80), self._half(scales))
            return pack_q4(codes, self._half(scales))
        zeros = self.zeros(first, last)[:, group].astype(np.float32)
        if self.bits == 8:
            return pack_q8(codes, self._half(scales), zeros.astype("<f2"))
        mins = -scales * zeros
        return pack_q4(codes, self._half(scales), self._half(mins))

    def _floats(self, first: int, last: int) -> Bytes:
        group = self.groups if self.groups is not None else np.arange(self.shape[1]) // self.group_size
        codes = self.codes(first, last).astype(np.float32)
        zeros = self.zeros(first, last)[:, group].astype(np.float32) if self.zeros else 1 << (self.bits - 1)
        values = (codes - zeros) * self.scales(first, last)[:, group]
        return self._half(values).view(np.uint8)

    def _half(self, values: Float32) -> npt.NDArray[np.float16]:
        return to_half(values, self.field)


def to_half(values: Float32, field: str) -> npt.NDArray[np.float16]:
    """Rounded to float16. Raises FormatError where a finite value becomes infinite."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all() and np.isinf(half).sum() > np.isinf(values).sum():
        raise FormatError("holds values beyond float16's 65504", field=field)
    return half


def unpack_words(words: npt.NDArray[np.int32], bits: int) -> Bytes:
    """int32 words of shape s → their 4- or 8-bit fields, lowest first: uint8 of shape (*s, 32 / bits)."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    fields = np.empty((*words.shape, 8), np.uint8)
    fields[..., 0::2] = octets & 0x0F
    fields[..., 1::2] = octets >> 4
    return fields


def unpack_columns(words: npt.NDArray[np.int32], bits: int, first: int, last: int) -> Bytes:
    """Columns ``first:last`` of a matrix whose rows are packed in words: uint8 (rows, last - first)."""
    per_word = 32 // bits
    start = first // per_word
    fields = unpack_words(words[:, start : -(-last // per_word)], bits).reshape(len(words), -1)
    return fields[:, first - start * per_word : last - start * per_word]


def pack_q4(
    codes: Bytes, scales: npt.NDArray[np.float16], mins: npt.NDArray[np.float16] | None = None
) -> Bytes:
    """Codes 0..15 (n, columns) and float16 (n, columns / 32) → rows of Q4_0 blocks, or of Q4_1 with ``mins``."""
    n, n_blocks = scales.shape
    halves = codes.reshape(n, n_blocks, 2, 16)
    parts = [scales] if mins is None else [scales, mins]
    out = np.empty((n, n_blocks, 2 * len(parts) + 16), np.uint8)
    for index, part in enumerate(parts):
        out[:, :, 2 * index : 2 * index + 2] = np.ascontiguousarray(part)[..., None].view(np.uint8)
    out[:, :, -16:] = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return out.reshape(n, -1)


def pack_q8(
    codes: Bytes, scales: npt.NDArray[np.float16], zeros: npt.NDArray[np.float16] | None = None
) -> Bytes:
    """Bytes of codes (n, columns) and float16 (n, columns / 32) → rows of Q8_0 blocks, or of Q8_Z with ``zeros``.

    Codes are int8 in Q8_0 and uint8 in Q8_Z.
    """
    n, n_blocks = scales.shape
    parts = [scales] if zeros is None else [scales, zeros]
    out = np.empty((n, n_blocks, 2 * len(parts) + 32), np.uint8)
    for index, part in enumerate(parts):
        out[:, :, 2 * index : 2 * index + 2] = np.ascontiguousarray(part)[..., None].view(np.uint8)
    out[:, :, -32:] = codes.reshape(n, n_blocks, 32)
    return out.reshape(n, -1)
