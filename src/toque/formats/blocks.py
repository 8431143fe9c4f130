"""The GGML tensor types: how many elements a block holds and how many bytes it takes in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockType:
    """``elements`` consecutive values of a row are stored in ``nbytes`` bytes."""

    id: int
    name: str
    elements: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` elements, which must be a multiple of ``elements``."""
        return columns // self.elements * self.nbytes


_TABLE = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(15, "Q8_K", 256, 292),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1),
    BlockType(25, "I16", 1, 2),
    BlockType(26, "I32", 1, 4),
    BlockType(27, "I64", 1, 8),
    BlockType(28, "F64", 1, 8),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(-1, "F8_E4M3", 32, 36),  # ours, of checkpoints with FP8 weights: formats/e4m3.py
    BlockType(-1, "F8_E4M3_32", 32, 36),
    BlockType(-1, "Q8_Z", 32, 36),  # ours, of 8-bit codes with zero points: formats/schemes/integers.py
)

BY_ID: Mapping[int, BlockType] = MappingProxyType({t.id: t for t in _TABLE if t.id >= 0})
BY_NAME: Mapping[str, BlockType] = MappingProxyType({t.name: t for t in _TABLE})

RUNNABLE: frozenset[str] = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "F8_E4M3", "F8_E4M3_32", "Q8_Z"}
)
"""The types that `toque.formats.dequantize` knows; a model with any other is refused before it is loaded."""
