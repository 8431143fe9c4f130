"""Weight types that a backend has no kernels for, in types that it has, without changing what they mean.

======  =======  ==========================================================================================
from    to       how
======  =======  ==========================================================================================
IQ4_NL  Q8_0     the 16 values are whole numbers of at most 127: exact
IQ4_XS  Q8_0     the same, the product of the two scales of each 32 rounded to float16
MXFP4   Q8_0     twice the e2m1 values are whole numbers, the scale is a power of two: exact where float16 has it
Q3_K    Q6_K     codes -4..3 and 6-bit scales fit Q6_K's, group by group: exact
Q2_K    F16      each weight rounded once: its minimum per 16 fits no other type
======  =======  ==========================================================================================

More bytes are read than the file's own type would need; nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Bytes, ConvertedRows, TensorData
from toque.formats.dequant import dequantize, iq4_nl_parts, iq4_xs_parts, mxfp4_parts, q3_k_parts
from toque.formats.schemes.integers import pack_q8, to_half


def transcoded(tensor: TensorData) -> TensorData:
    """The tensor in a type that every backend has kernels for, or the tensor itself. Nothing is read yet."""
    target = _TARGETS.get(tensor.dtype)
    if target is None:
        return tensor
    dtype, convert = target
    if tensor.parts:
        return replace(tensor, dtype=dtype, parts=tuple(map(transcoded, tensor.parts)))
    columns = tensor.shape[-1]

    def rows(first: int, last: int) -> Bytes:
        piece = TensorData(tensor.name, tensor.dtype, (last - first, columns), tensor.raw[first:last])
        return convert(piece).reshape(last - first, -1)

    converted = ConvertedRows(tensor.raw.shape[0], BY_NAME[dtype].row_bytes(columns), rows)
    return replace(tensor, dtype=dtype, raw=converted)


def _blocks(tensor: TensorData) -> Bytes:
    return np.ascontiguousarray(tensor.raw).reshape(-1, BY_NAME[tensor.dtype].nbytes)


def _to_q8_0(
    parts: Callable[[Bytes], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]], tensor: TensorData
) -> Bytes:
    values, scales = parts(_blocks(tensor))
    codes = values.astype(np.int8).view(np.uint8).reshape(-1, 32)
    return pack_q8(codes, to_half(scales.reshape(-1, 1), tensor.name))


def _q3_k_to_q6_k(tensor: TensorData) -> Bytes:
    blocks = _blocks(tensor)
    signed, scales = q3_k_parts(blocks)
    codes = (signed + np.int8(32)).astype(np.uint8)
    out = np.empty((len(blocks), 210), np.uint8)
    # Two halves of 128: 64 bytes whose low nibbles come first, and 32 bytes with the top two bits of all four runs.
    nibbles = (codes & 15).reshape(-1, 2, 2, 64)
    out[:, :128] = (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).reshape(-1, 128)
    tops = (codes >> 4).reshape(-1, 2, 4, 32)
    out[:, 128:192] = (
        tops[:, :, 0] | (tops[:, :, 1] << 2) | (tops[:, :, 2] << 4) | (tops[:, :, 3] << 6)
    ).reshape(-1, 64)
    out[:, 192:208] = scales.view(np.uint8)
    out[:, 208:] = blocks[:, 108:110]
    return out


_TARGETS: Mapping[str, tuple[str, Callable[[TensorData], Bytes]]] = MappingProxyType(
    {
        "IQ4_NL": ("Q8_0", lambda tensor: _to_q8_0(iq4_nl_parts, tensor)),
        "IQ4_XS": ("Q8_0", lambda tensor: _to_q8_0(iq4_xs_parts, tensor)),
        "MXFP4": ("Q8_0", lambda tensor: _to_q8_0(mxfp4_parts, tensor)),
        "Q3_K": ("Q6_K", _q3_k_to_q6_k),
        "Q2_K": ("F16", lambda tensor: to_half(dequantize(tensor), tensor.name).view(np.uint8)),
    }
)
