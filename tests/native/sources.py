"""Raw weight rows of every packable GGML type, with the values they stand for (from the `gguf` package)."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from toque.formats.e4m3 import pack_f8

F8_TYPES = ("F8_E4M3", "F8_E4M3_32")  # with a scale for each 128 values of a row, and for each 32
FLOAT_TYPES = ("F32", "F16", "BF16", *F8_TYPES)
EXACT_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_Z",
    "IQ4_NL",
    "MXFP4",
)  # packing keeps every bit of their meaning
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # packing rounds scale products to f16
INTEGER_TYPES = EXACT_TYPES + K_TYPES
ALL_TYPES = FLOAT_TYPES + INTEGER_TYPES

Bytes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]


def _e4m3(codes: Bytes) -> Float:
    """By torch, which has the type."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).float().numpy()


def columns(dtype: str) -> int:
    """The smallest awkward K a type allows: not a multiple of 64 where it may be."""
    return 256 if dtype in K_TYPES else 96 if dtype in INTEGER_TYPES else 160 if dtype in F8_TYPES else 37


def raw_rows(dtype: str, rows: int, cols: int, seed: int = 0) -> Bytes:
    """Random blocks: every code occurs, scales are moderate."""
    rng = np.random.default_rng(seed)
    if dtype in F8_TYPES:
        span = 128 if dtype == "F8_E4M3" else 32
        codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        return pack_f8(codes, rng.uniform(1e-4, 2e-3, (rows, -(-cols // span))).astype(np.float32), span)
    if dtype == "Q8_Z":
        raw = rng.integers(0, 256, (rows, cols // 32, 36), dtype=np.uint8)
        fields = rng.uniform(-0.02, 0.02, (rows, cols // 32, 2)).astype(np.float16)
        fields[..., 1] = rng.integers(0, 257, fields.shape[:2])
        raw[:, :, :4] = fields.view(np.uint8)
        return raw.reshape(rows, -1)
    kind = gguf.GGMLQuantizationType[dtype]
    if dtype in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        return np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    if dtype == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 123, raw.shape[:2])
        return raw.reshape(rows, -1)
    one_scale = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")
    scale_at = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82]}.get(
        dtype, [0] if dtype in one_scale else [0, 2]
    )
    for at in scale_at:
        scales = rng.uniform(-0.02, 0.02, (rows, cols // block)).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def values_of(dtype: str, raw: Bytes) -> Float:
    if dtype == "F32":
        return np.ascontiguousarray(raw).view(np.float32)
    if dtype in F8_TYPES:
        blocks = raw.reshape(len(raw), -1, 36)
        scales = np.ascontiguousarray(blocks[:, :, :4]).view(np.float32)
        return (scales * _e4m3(blocks[:, :, 4:])).reshape(len(raw), -1)
    if dtype == "Q8_Z":  # scale * (code - zero), in float64: float32 holds it exactly
        blocks = raw.reshape(len(raw), -1, 36)
        fields = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float64)
        values = (blocks[:, :, 4:] - fields[..., 1:]) * fields[..., :1]
        return values.reshape(len(raw), -1).astype(np.float32)
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype]), dtype=np.float32)
