"""What others wrote: GGUF files, safetensors folders, checkpoint configurations, quantized block formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toque.formats.dequant import dequantize
    from toque.formats.load import load_checkpoint

__all__ = ["dequantize", "load_checkpoint"]

_HOMES = {"dequantize": "toque.formats.dequant", "load_checkpoint": "toque.formats.load"}


def __getattr__(name: str) -> Any:
    # Lazily: whoever wants only the types of `checkpoint` does not pay for the readers.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
