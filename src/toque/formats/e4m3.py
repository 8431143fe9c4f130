"""FP8 values (e4m3), and rows of them with scales as the block type ``F8_E4M3``.

A block is 32 values: a float32 scale, then a byte each. No file has it; it is what checkpoints with e4m3 weights
become, whatever their scales span, as long as the backend finds one scale for each 128 values.
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


def packs(columns: int, span: int) -> bool:
    """Whether rows of so many columns, with a scale for each ``span`` of them, can be ``F8_E4M3``."""
    return columns % BLOCK == 0 and (span % SPAN == 0 or span >= columns)


def pack_f8(codes: Bytes, scales: Float32, span: int) -> Bytes:
    """Codes (n, K) and scales (n, ceil(K / span)) → rows of ``F8_E4M3`` blocks, uint8 (n, 36 K / 32)."""
    rows, columns = codes.shape
    of_block = np.arange(columns // BLOCK) * BLOCK // span
    out = np.empty((rows, columns // BLOCK, 4 + BLOCK), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scales[:, of_block], "<f4")[..., None].view(np.uint8)
    out[:, :, 4:] = codes.reshape(rows, -1, BLOCK)
    return out.reshape(rows, -1)
