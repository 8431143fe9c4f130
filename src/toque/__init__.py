"""Toque: an inference engine and serving platform for language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "ToqueError", "__version__"]

if TYPE_CHECKING:
    from toque.engine.llm import LLM
    from toque.errors import ToqueError
    from toque.text.grammar.structured import StructuredOutputs
    from toque.types import SamplingParams

# The command line must answer `--help` in 0.2 s, so nothing heavy is imported until it is named.
_LAZY = {
    "LLM": "toque.engine.llm",
    "SamplingParams": "toque.types",
    "StructuredOutputs": "toque.text.grammar.structured",
    "ToqueError": "toque.errors",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'toque' has no attribute {name!r}")
