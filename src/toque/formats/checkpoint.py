"""What every file format is turned into: a configuration and named tensors whose bytes stay in the mapped file.

Tensor names are GGUF's (``token_embd.weight``, ``blk.0.attn_q.weight`` …) whatever the source was, norm weights are
ready to multiply with (gemma's +1 is applied), and rotary halves are laid out as Hugging Face does (first half,
second half): ``row_order`` undoes the interleaving that GGUF's llama files apply to q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from toque.types import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorData:
    """One tensor. ``dtype`` is a GGML type name (``F32``, ``BF16``, ``Q4_1`` …), ``shape`` is (rows, columns) or (n,).

    ``raw`` is a read-only uint8 view of shape (rows, bytes per row) into the mapped file (rows is 1 for vectors).
    ``row_order``, when present, lists the source row of each logical row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)


class TokenizerSource(Protocol):
    """Marker for what `toque.text.tokenizer.load_tokenizer` accepts: GGUF metadata or a folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that has been read and checked but not loaded. The files stay open while it lives.

    ``metadata`` is the GGUF key/value table, or ``{}``: Python scalars, numpy arrays for arrays of numbers, and
    `toque.formats.strings.StringArray` for arrays of strings. ``folder`` is the safetensors folder, or None.
    """

    path: Path
    format: str  # "gguf" or "safetensors"
    config: ModelConfig
    tensors: Mapping[str, TensorData]
    quantization: str  # the dominant weight type, for people
    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(t.shape)) for t in self.tensors.values())
