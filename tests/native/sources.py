"""Raw weight rows of every packable GGML type, with the values they stand for (from the `gguf` package)."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

FLOAT_TYPES = ("F32", "F16", "BF16")
EXACT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # packing keeps every bit of their meaning
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")  # packing rounds scale products to f16
INTEGER_TYPES = EXACT_TYPES + K_TYPES
ALL_TYPES = FLOAT_TYPES + INTEGER_TYPES

Bytes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]


def columns(dtype: str) -> int:
    """The smallest awkward K a type allows: not a multiple of 64 where it may be."""
    return 256 if dtype in K_TYPES else 96 if dtype in INTEGER_TYPES else 37


def raw_rows(dtype: str, rows: int, cols: int, seed: int = 0) -> Bytes:
    """Random blocks: every code occurs, scales are moderate."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[dtype]
    if dtype in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        return np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    scale_at = [208] if dtype == "Q6_K" else [0] if dtype in ("Q4_0", "Q5_0", "Q8_0") else [0, 2]
    for at in scale_at:
        scales = rng.uniform(-0.02, 0.02, (rows, cols // block)).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def values_of(dtype: str, raw: Bytes) -> Float:
    if dtype == "F32":
        return np.ascontiguousarray(raw).view(np.float32)
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype]), dtype=np.float32)
