"""Pre-quantized checkpoints: one file for each published layout, found by ``quantization_config.quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from toque.errors import UnsupportedModelError
from toque.formats.fields import Fields
from toque.formats.schemes.awq import AWQ
from toque.formats.schemes.base import Layer, Matrix, Scheme
from toque.formats.schemes.compressed import CompressedTensors
from toque.formats.schemes.fp8 import FP8
from toque.formats.schemes.gptq import GPTQ

__all__ = ["LAYOUTS", "METHODS", "Layer", "Matrix", "Scheme", "read_scheme"]

METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "awq": AWQ.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
}

LAYOUTS: tuple[tuple[str, str, str], ...] = (
    ("gptq", "4 bit, symmetric (`sym`), groups of a multiple of 32 or whole columns", "Q4_0"),
    ("gptq", "4 bit, with zero points", "Q4_1"),
    ("gptq", "8 bit, symmetric", "Q8_0"),
    ("gptq", "8 bit, with zero points", "Q8_Z"),
    ("gptq", "other group sizes", "F16"),
    ("awq", "4 bit, `gemm` layout", "Q4_1"),
    ("compressed-tensors", "W4A16 symmetric, by group or channel", "Q4_0"),
    ("compressed-tensors", "W4A16 with zero points", "Q4_1"),
    ("compressed-tensors", "W8A8 and W8A16, symmetric, by channel, group or tensor", "Q8_0"),
    ("compressed-tensors", "8 bit, with zero points", "Q8_Z"),
    ("compressed-tensors", "integers in other group sizes", "F16"),
    (
        "compressed-tensors",
        "FP8 e4m3, scales by tensor, channel, or block of 128 columns or a multiple",
        "F8_E4M3",
    ),
    (
        "compressed-tensors",
        "FP8 e4m3, scales by group or block of another multiple of 32 columns",
        "F8_E4M3_32",
    ),
    ("compressed-tensors", "FP8 e4m3, scales by other blocks", "F16"),
    ("fp8", "e4m3, scales by tensor, or block (`weight_block_size`) of 128 columns or a multiple", "F8_E4M3"),
    ("fp8", "e4m3, scales by block of another multiple of 32 columns", "F8_E4M3_32"),
    ("fp8", "e4m3, scales by other blocks", "F16"),
)
"""For people: quant_method, what a layer may be, the GGML type that it becomes."""


def read_scheme(config: Fields) -> Scheme | None:
    """The scheme that config.json names, or None. Raises UnsupportedModelError for one that Toque does not read."""
    fields = config.object("quantization_config")
    older = config.object("compression_config")  # compressed-tensors' own key, until it took the common one
    if fields is None and older is None:
        return None
    method = "compressed-tensors" if fields is None else fields.text("quant_method")
    fields = fields if fields is not None else older
    assert fields is not None, "one of the two is there"
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{fields.field('quant_method')}: {method[:40]!a} checkpoints are not supported; Toque reads "
            f"{', '.join(METHODS)}, plain F32, F16 and BF16, and GGUF files"
        )
    return METHODS[method](fields)
