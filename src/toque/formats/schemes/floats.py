"""FP8 (e4m3) weights with scales, as they are or as F16.

F16 is for scales that change within a run of 32 columns, where no kernel expects it. The product of a 4-bit significand
and a scale, rounded to float16's 11 bits, is off by at most 2^-12 of itself, a hundredth of what FP8 itself lost;
bfloat16 would lose 16 times more. NaN codes stay NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Bytes, ConvertedRows
from toque.formats.e4m3 import E4M3, block_type, pack_f8
from toque.formats.schemes.base import Float32, Matrix
from toque.formats.schemes.integers import to_half

_HALF_MAX = 65504


def fp8_matrix(
    field: str,
    codes: npt.NDArray[np.uint8],
    block: tuple[int, int],
    scales: Callable[[int, int], Float32],
) -> Matrix:
    """Codes (rows, columns); ``scales(first, last)`` are rows of a scale for each ``block`` of the matrix."""
    rows, columns = codes.shape

    def convert(first: int, last: int) -> Bytes:
        block_rows = scales(first // block[0], -(-last // block[0]))
        row_block = np.arange(first, last) // block[0] - first // block[0]
        out = np.empty((last - first, columns), "<f2")
        if not np.abs(block_rows).max() * np.float32(448) < _HALF_MAX:
            values = E4M3[codes[first:last]] * np.repeat(block_rows, block[1], axis=1)[row_block, :columns]
            return to_half(values, field).view(np.uint8)
        # Block by block: a scalar or a column times a slice, which is several times as fast as a matrix of scales.
        values = np.take(E4M3, codes[first:last])
        for index, start in enumerate(range(0, columns, block[1])):
            part = slice(start, start + block[1])
            np.multiply(
                values[:, part], block_rows[row_block, index, None], out=out[:, part], casting="same_kind"
            )
        return out.view(np.uint8)

    def keep(first: int, last: int) -> Bytes:
        row_block = np.arange(first, last) // block[0] - first // block[0]
        return pack_f8(
            codes[first:last], scales(first // block[0], -(-last // block[0]))[row_block], block[1]
        )

    kind = block_type(columns, block[1])
    if kind:
        return Matrix(kind, (rows, columns), ConvertedRows(rows, BY_NAME[kind].row_bytes(columns), keep))
    return Matrix("F16", (rows, columns), ConvertedRows(rows, 2 * columns, convert))
