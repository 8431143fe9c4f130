"""Float weights to fewer bits: per-block scales searched for the least error, as weights are loaded.

======  =================================================  ============================  ==========================
scheme  linear layers (and a layer's experts)              embeddings, output matrix     norms, biases, routers
======  =================================================  ============================  ==========================
int8    Q8_0                                               Q8_0                          kept
int4    Q4_0                                               Q8_0                          kept
fp8     e4m3 with a scale per output channel               kept                          kept
======  =================================================  ============================  ==========================

Errors of the embeddings and of the output matrix reach the logits unfiltered, which is why int4 spares them. Matrices
whose rows are not whole blocks of 32 are kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from toque.errors import ConfigError
from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Bytes, Checkpoint, ConvertedRows, TensorData
from toque.formats.dequant import dequantize
from toque.formats.e4m3 import pack_f8
from toque.formats.schemes.integers import pack_q4, pack_q8, to_half

Float32 = npt.NDArray[np.float32]

FLOATS = frozenset({"F32", "F16", "BF16"})
BLOCK = 32
# Scales tried for a group, as the code that its largest value gets; each is refined by least squares. More of them
# gain nothing that can be measured: 5 take 3.4 % off the error of the first alone, 16 take 3.7 %.
_CACHED = 1 << 16  # values searched at a time: float32 and a copy stay in the cache of a core
_CANDIDATES = (-8.0, -7.5, -7.0, -8.5, -9.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The GGML types of linear layers and of the embeddings and output matrix; None keeps them."""

    linear: str
    outer: str | None


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"int8": Recipe("Q8_0", "Q8_0"), "int4": Recipe("Q4_0", "Q8_0"), "fp8": Recipe("FP8", None)}
)
_OUTER = frozenset({"token_embd.weight", "output.weight"})
# Encoders' small tables, and what picks a token's experts.
_KEPT = ("position_embd.weight", "token_types.weight", "gate_inp.weight")


def quantize_checkpoint(checkpoint: Checkpoint, scheme: str) -> Checkpoint:
    """The same model with quantized weights, each computed when its bytes are asked for.

    Raises ConfigError for an unknown scheme, and for a model that is quantized already.
    """
    recipe = RECIPES.get(scheme)
    if recipe is None:
        raise ConfigError(
            f"quantize must be one of {', '.join(RECIPES)}, got {scheme[:40]!r}", param="quantize"
        )
    if checkpoint.quantization not in FLOATS:
        raise ConfigError(
            f"quantize {scheme} needs a model in F32, F16 or BF16, this one is {checkpoint.quantization}",
            param="quantize",
        )
    tensors = {name: quantized(tensor, recipe) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, quantization=scheme)


def quantized(tensor: TensorData, recipe: Recipe) -> TensorData:
    """The tensor in the type that the recipe has for it, or the tensor itself."""
    kind = recipe.outer if tensor.name in _OUTER else recipe.linear
    if kind is None or len(tensor.shape) < 2 or tensor.shape[-1] % BLOCK or tensor.name.endswith(_KEPT):
        return tensor
    if tensor.parts:
        return replace(
            tensor, dtype=_stored_type(kind), parts=tuple(as_type(part, kind) for part in tensor.parts)
        )
    return as_type(tensor, kind)


def as_type(tensor: TensorData, kind: str) -> TensorData:
    """The tensor in another type (``Q8_0``, ``Q4_0``, ``FP8``, F16, F32), converted row by row when asked for."""
    columns, encode = tensor.shape[-1], _ENCODERS[kind]
    dtype = _stored_type(kind)

    def convert(first: int, last: int) -> Bytes:
        shape, raw = (last - first, columns), tensor.raw[first:last]
        piece = TensorData(tensor.name, tensor.dtype, shape, raw, column_order=tensor.column_order)
        return encode(dequantize(piece), tensor.name)

    rows = ConvertedRows(tensor.raw.shape[0], BY_NAME[dtype].row_bytes(columns), convert)
    return replace(tensor, dtype=dtype, raw=rows, column_order=None)


def _stored_type(kind: str) -> str:
    return "F8_E4M3" if kind == "FP8" else kind


def four_bits(
    values: Float32,
    rounded: Callable[[Float32], Float32] = lambda scale: scale.astype("<f2").astype(np.float32),
) -> tuple[npt.NDArray[np.int8], Float32]:
    """Codes -8..7 and one scale (n, 1) for each row of ``values`` (n, group): the least error of five tries.

    Errors count squared and times the weight's size: large weights carry a layer's output, and with equal squares the
    search clips them. ``rounded`` is what storing a scale makes of it.
    """
    codes, scales = np.empty(values.shape, np.int8), np.empty((len(values), 1), np.float32)
    step = max(1, _CACHED // values.shape[1])
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        scales[part] = rounded(_best_scale(values[part]))
        codes[part] = _codes(values[part], scales[part], np.empty_like(values[part]))
    return codes, scales


def _best_scale(values: Float32) -> Float32:
    """With ``<a, b>`` the sum of ``|x| a b``, the best scale of codes q is ``<x, q> / <q, q>``.

    The error then is ``<x, x> - <x, q>² / <q, q>``.
    """
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    most, best = np.full((len(values), 1), -1, np.float32), np.zeros((len(values), 1), np.float32)
    size = np.abs(values)
    size /= np.maximum(size.max(axis=1, keepdims=True), np.float32(1e-30))
    buffer, weighted = np.empty_like(values), np.empty_like(values)
    for candidate in _CANDIDATES:
        codes = _codes(values, largest / np.float32(candidate), buffer)
        np.multiply(size, codes, out=weighted)
        product = np.einsum("ij,ij->i", values, weighted)[:, None]
        scale = product / np.maximum(np.einsum("ij,ij->i", codes, weighted)[:, None], np.float32(1))
        gain = scale * product
        best = np.where(gain > most, scale, best)
        most = np.maximum(gain, most)
    return best


def _codes(values: Float32, scale: Float32, out: Float32) -> Float32:
    """The nearest codes -8..7, written to ``out``; 0 where the scale is."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    np.multiply(values, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, -8, 7, out=out)


def eight_bits(
    values: Float32, rounded: Callable[[Float32], Float32] = lambda scale: scale
) -> tuple[npt.NDArray[np.int8], Float32]:
    """Codes -127..127 and one scale (n, 1) for each row of ``values``."""
    scale = rounded(np.abs(values).max(axis=1, keepdims=True) / np.float32(127))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale == 0, np.float32(0), values / scale)
    return np.clip(np.rint(codes), -127, 127).astype(np.int8), scale


def e4m3_codes(values: Float32) -> Bytes:
    """The nearest e4m3 value (ties to even) of each, as its byte; beyond ±448 is ±448."""
    size = np.minimum(np.abs(values), np.float32(448))
    bits = size.view(np.uint32)
    # Normal numbers keep three bits of mantissa, and their exponent's bias falls from 127 to 7.
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    subnormal = np.rint(size * np.float32(512)).astype(np.uint32)
    codes: Bytes = np.where(size < np.float32(2**-6), subnormal, normal).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes


def channel_fp8(
    values: Float32, rounded: Callable[[Float32], Float32] = lambda scale: scale
) -> tuple[Bytes, Float32]:
    """e4m3 bytes and one scale (n, 1) for each row."""
    scale = rounded(np.abs(values).max(axis=1, keepdims=True) / np.float32(448))
    with np.errstate(divide="ignore", invalid="ignore"):
        return e4m3_codes(np.where(scale == 0, np.float32(0), values / scale)), scale


def _q4_0(values: Float32, name: str) -> Bytes:
    codes, scales = four_bits(values.reshape(-1, BLOCK))
    unsigned = (codes + 8).astype(np.uint8).reshape(values.shape)
    return pack_q4(unsigned, to_half(scales.reshape(len(values), -1), name))


def _q8_0(values: Float32, name: str) -> Bytes:
    codes, scales = eight_bits(values.reshape(-1, BLOCK))
    return pack_q8(codes.view(np.uint8).reshape(values.shape), to_half(scales.reshape(len(values), -1), name))


def _fp8(values: Float32, _: str) -> Bytes:
    codes, scales = channel_fp8(values)
    return pack_f8(codes, scales, values.shape[1])


_ENCODERS: Mapping[str, Callable[[Float32, str], Bytes]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q8_0": _q8_0,
        "FP8": _fp8,
        "F16": lambda values, name: to_half(values, name).view(np.uint8),
        "F32": lambda values, _: np.ascontiguousarray(values, "<f4").view(np.uint8),
    }
)
