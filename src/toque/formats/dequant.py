"""Quantized blocks to float32, in plain numpy.

This is the meaning of every weight format: the reference backend computes with it and the native kernels are tested
against it. The block layouts are those of GGML's file types; the order of the float32 operations is fixed, so the
result is the same bit for bit wherever it is computed.

Each ``_<type>`` function takes uint8 blocks of shape (n, bytes of a block) and returns float32 of shape
(n, elements of a block).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from toque.errors import UnsupportedModelError
from toque.formats.blocks import BY_NAME, RUNNABLE
from toque.formats.checkpoint import TensorData
from toque.formats.e4m3 import E4M3

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

_CHUNK_BYTES = 1 << 22  # blocks expanded at a time: the temporaries stay in the cache's neighbourhood

_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
# Twice the e2m1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6): GGML keeps them whole and halves the scale instead.
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def dequantize(tensor: TensorData) -> Float32:
    """float32 of the tensor's logical shape, rows and columns in logical order. Always a fresh array.

    Raises UnsupportedModelError for a type that Toque does not run.
    """
    kind = tensor.dtype
    if tensor.parts:
        return np.stack([dequantize(part) for part in tensor.parts])
    if kind not in RUNNABLE:
        raise UnsupportedModelError(f"tensor {tensor.name} has type {kind}, which Toque cannot run yet")
    block = BY_NAME[kind]
    blocks = np.ascontiguousarray(tensor.raw).reshape(-1, block.nbytes)
    out = np.empty((blocks.shape[0], block.elements), dtype=np.float32)
    expand = _EXPAND[kind]
    step = max(1, _CHUNK_BYTES // block.nbytes)
    # Infinite or NaN scales are the file's business: they come out as they are, without a warning for each.
    with np.errstate(all="ignore"):
        for start in range(0, blocks.shape[0], step):
            out[start : start + step] = expand(blocks[start : start + step])
    result = out.reshape(tensor.shape)
    if tensor.column_order is not None:
        stored, result = result, np.empty_like(result)
        result[:, tensor.column_order] = stored
    return result if tensor.row_order is None else result[tensor.row_order]


def _f16(column: Bytes) -> Float32:
    """Little-endian float16 in the last two bytes axis → float32 with a trailing axis of 1."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(n, k) bytes → (n, 2k): all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _high_bits(packed: Bytes) -> Bytes:
    """(n, 4) bytes → (n, 32): bit i of the little-endian word, moved to bit 4."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _f32(b: Bytes) -> Float32:
    return b.view("<f4")


def _plain_f16(b: Bytes) -> Float32:
    return _f16(b)


def _bf16(b: Bytes) -> Float32:
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Bytes) -> Float32:
    return (_nibbles(b[:, 2:]).astype(np.float32) - np.float32(8)) * _f16(b[:, :2])


def _q4_1(b: Bytes) -> Float32:
    return _f16(b[:, :2]) * _nibbles(b[:, 4:]).astype(np.float32) + _f16(b[:, 2:4])


def _q5_0(b: Bytes) -> Float32:
    q = _nibbles(b[:, 6:]) | _high_bits(b[:, 2:6])
    return (q.astype(np.float32) - np.float32(16)) * _f16(b[:, :2])


def _q5_1(b: Bytes) -> Float32:
    q = _nibbles(b[:, 8:]) | _high_bits(b[:, 4:8])
    return _f16(b[:, :2]) * q.astype(np.float32) + _f16(b[:, 2:4])


def _q8_0(b: Bytes) -> Float32:
    return b[:, 2:].view(np.int8).astype(np.float32) * _f16(b[:, :2])


def _q8_z(b: Bytes) -> Float32:
    return (b[:, 4:].astype(np.float32) - _f16(b[:, 2:4])) * _f16(b[:, :2])


def _crumbs(packed: Bytes) -> Bytes:
    """(n, 64) bytes → (n, 256) 2-bit values: each run of 32 bytes gives four runs of 32, lowest bits first."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 256)


def _bit_planes(packed: Bytes) -> Bytes:
    """(n, 32) bytes → (n, 256) bits: run g of 32 is bit g of every byte."""
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    return ((packed.reshape(-1, 1, 32) >> shifts) & np.uint8(1)).reshape(-1, 256)


def _nibble_runs(packed: Bytes) -> Bytes:
    """(n, 128) bytes → (n, 256): each run of 32 bytes gives its 32 low halves, then its 32 high halves."""
    shifts = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    return ((packed.reshape(-1, 4, 1, 32) >> shifts) & np.uint8(0x0F)).reshape(-1, 256)


def _q2_k(b: Bytes) -> Float32:
    scales, q = b[:, :16], _crumbs(b[:, 16:80]).reshape(-1, 16, 16)
    scale = _f16(b[:, 80:82]) * (scales & 0x0F).astype(np.float32)
    low = _f16(b[:, 82:84]) * (scales >> 4).astype(np.float32)
    return (scale[:, :, None] * q.astype(np.float32) - low[:, :, None]).reshape(-1, 256)


def q3_k_parts(b: Bytes) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Q3_K blocks → codes -4..3 (n, 256) and scales -32..31 (n, 16); the block's own scale is its last two bytes."""
    # The mask holds the third bit inverted: where it is clear, 4 is subtracted.
    q = _crumbs(b[:, 32:96]).astype(np.int8) - ((_bit_planes(b[:, :32]) ^ 1) << 2).astype(np.int8)
    low = _nibbles(b[:, 96:104])
    high = (b[:, None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    return q, (low | (high.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)


def _q3_k(b: Bytes) -> Float32:
    q, scales = q3_k_parts(b)
    scale = _f16(b[:, 108:110]) * scales.astype(np.float32)
    return (scale[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _k_scales(packed: Bytes) -> tuple[Float32, Float32]:
    """The 12 bytes of Q4_K and Q5_K → eight 6-bit scales and eight 6-bit minimums.

    Bytes 0-3 and 4-7 hold the first four of each in their low six bits; their top two bits complete the nibbles that
    bytes 8-11 hold for the last four.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 0x0F) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (last >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _scaled_minus_min(b: Bytes, q: Bytes) -> Float32:
    scales, mins = _k_scales(b[:, 4:16])
    scale, low = _f16(b[:, 0:2]) * scales, _f16(b[:, 2:4]) * mins
    return (scale[:, :, None] * q.reshape(-1, 8, 32).astype(np.float32) - low[:, :, None]).reshape(-1, 256)


def _q4_k(b: Bytes) -> Float32:
    return _scaled_minus_min(b, _nibble_runs(b[:, 16:144]))


def _q5_k(b: Bytes) -> Float32:
    return _scaled_minus_min(b, _nibble_runs(b[:, 48:176]) | (_bit_planes(b[:, 16:48]) << np.uint8(4)))


def _q6_k(b: Bytes) -> Float32:
    # Two halves of 128: 64 bytes give 64 low nibbles then 64 high ones; 32 bytes hold the top two bits of all.
    shifts = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    low = ((b[:, :128].reshape(-1, 2, 1, 64) >> shifts) & np.uint8(0x0F)).reshape(-1, 256)
    q = (low | (_crumbs(b[:, 128:192]) << 4)).astype(np.int8) - np.int8(32)
    scale = _f16(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def iq4_nl_parts(b: Bytes) -> tuple[Float32, Float32]:
    """IQ4_NL blocks → whole-numbered values (n, 32) and scales (n, 1)."""
    return _IQ4_VALUES[_nibbles(b[:, 2:])], _f16(b[:, :2])


def _iq4_nl(b: Bytes) -> Float32:
    values, scale = iq4_nl_parts(b)
    return scale * values


def iq4_xs_parts(b: Bytes) -> tuple[Float32, Float32]:
    """IQ4_XS blocks → whole-numbered values (n, 8, 32) and scales (n, 8, 1)."""
    low = (b[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8)) & 0x0F
    high = (np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low.reshape(-1, 8) | (high.astype(np.uint8) << 4)).astype(np.float32) - np.float32(32)
    scale = _f16(b[:, :2]) * scales
    q = _nibbles(b[:, 8:136].reshape(-1, 16)).reshape(-1, 8, 32)
    return _IQ4_VALUES[q], scale[:, :, None]


def _iq4_xs(b: Bytes) -> Float32:
    values, scale = iq4_xs_parts(b)
    return (scale * values).reshape(-1, 256)


def mxfp4_parts(b: Bytes) -> tuple[Float32, Float32]:
    """MXFP4 blocks → whole-numbered values (n, 32) and scales (n, 1)."""
    # The scale byte is an exponent: 2^(e - 127), halved; the two smallest are float32 subnormals.
    exponent = b[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23)
    return _MXFP4_VALUES[_nibbles(b[:, 1:])], bits.astype(np.uint32).view(np.float32)


def _mxfp4(b: Bytes) -> Float32:
    values, scale = mxfp4_parts(b)
    return scale * values


def _f8_e4m3(b: Bytes) -> Float32:
    scale: Float32 = np.ascontiguousarray(b[:, :4]).view("<f4")
    return scale * E4M3[b[:, 4:]]


_EXPAND: dict[str, Callable[[Bytes], Float32]] = {
    "F32": _f32,
    "F16": _plain_f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q8_Z": _q8_z,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "F8_E4M3": _f8_e4m3,
    "F8_E4M3_32": _f8_e4m3,
}
