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

__all__ = ["METHODS", "Layer", "Matrix", "Scheme", "read_scheme"]

METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "awq": AWQ.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
}


def read_scheme(config: Fields) -> Scheme | None:
    """The scheme that config.json names, or None. Raises UnsupportedModelError for one that Toque does not read."""
    fields = config.object("quantization_config")
    if fields is None:
        return None
    method = fields.text("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{fields.field('quant_method')}: {method[:40]!a} checkpoints are not supported; Toque reads "
            f"{', '.join(METHODS)}, plain F32, F16 and BF16, and GGUF files"
        )
    return METHODS[method](fields)
