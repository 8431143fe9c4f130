"""FP8 (e4m3) weights with scales, as F16.

The product of a 4-bit significand and a scale, rounded to float16's 11 bits, is off by at most 2^-12 of itself, a
hundredth of what FP8 itself lost; bfloat16 would lose 16 times more. NaN codes stay NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from toque.formats.checkpoint import Bytes, ConvertedRows
from toque.formats.schemes.base import Float32, Matrix
from toque.formats.schemes.integers import to_half


def _e4m3() -> Float32:
    """The value of each byte: sign, 4 exponent bits (bias 7), 3 of mantissa; no infinities, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values: Float32 = np.where(code & 128, -size, size).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3 = _e4m3()


def fp8_matrix(
    field: str,
    codes: npt.NDArray[np.uint8],
    block: tuple[int, int],
    scales: Callable[[int, int], Float32],
) -> Matrix:
    """Codes (rows, columns); ``scales(first, last)`` are rows of a scale for each ``block`` of the matrix."""
    rows, columns = codes.shape
    column_block = np.arange(columns) // block[1]

    def convert(first: int, last: int) -> Bytes:
        block_rows = scales(first // block[0], -(-last // block[0]))
        row_block = np.arange(first, last) // block[0] - first // block[0]
        values = E4M3[codes[first:last]] * block_rows[row_block][:, column_block]
        return to_half(values, field).view(np.uint8)

    return Matrix("F16", (rows, columns), ConvertedRows(rows, 2 * columns, convert))
