"""FP8 values (e4m3), and rows of them with scales as the block types ``F8_E4M3`` and ``F8_E4M3_32``.

A block is 32 values: a float32 scale, then a byte each. No file has it; it is what checkpoints with e4m3 weights
become. In ``F8_E4M3`` the blocks of each 128 values have the same scale, and the backend keeps one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
SPAN = 128  # values of a row that the cpu backend's kernels scale at once


def _values() -> Float32:
    """The value of each byte: sign, 4 exponent bits (bias 7), 3 of mantissa; no infinities, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values: Float32 = np.where(code & 128, -size, size).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3 = _values()


def block_type(columns: int, span: int) -> str:
    """What rows of so many columns, with a scale for each ``span`` of them, can be; "" for neither."""
    if columns % BLOCK or (span % BLOCK and span < columns):
        return ""
    return "F8_E4M3" if span % SPAN == 0 or span >= columns else "F8_E4M3_32"


def pack_f8(codes: Bytes, scales: Float32, span: int) -> Bytes:
    """Codes (n, K) and scales (n, ceil(K / span)) → rows of blocks, uint8 (n, 36 K / 32)."""
    rows, columns = codes.shape
    of_block = np.arange(columns // BLOCK) * BLOCK // span
    out = np.empty((rows, columns // BLOCK, 4 + BLOCK), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scales[:, of_block], "<f4")[..., None].view(np.uint8)
    out[:, :, 4:] = codes.reshape(rows, -1, BLOCK)
    return out.reshape(rows, -1)
