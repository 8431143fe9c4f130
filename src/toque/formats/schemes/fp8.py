"""FP8 checkpoints (``quant_method: fp8``): e4m3 weights with a scale for each block, or one for the whole matrix.

::

    weight            F8_E4M3 [N, K]
    weight_scale_inv  f32 [ceil(N/bn), ceil(K/bk)]   the scale itself, its name notwithstanding (weight_block_size)
    weight_scale      f32 [] or [1]                  without weight_block_size
"""

from __future__ import annotations

from dataclasses import dataclass

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.fields import Fields
from toque.formats.schemes.base import Layer, Matrix
from toque.formats.schemes.floats import fp8_matrix


@dataclass(frozen=True, slots=True)
class FP8:
    block: tuple[int, int] | None
    name: str = "FP8"

    @classmethod
    def read(cls, fields: Fields) -> FP8:
        kind = fields.text("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedModelError(f"{fields.field('fmt')}: {kind[:40]!a}; Toque reads e4m3")
        if "weight_block_size" not in fields:
            return cls(None)
        sizes = fields.integers("weight_block_size")
        if len(sizes) != 2 or 0 in sizes:
            raise FormatError(f"must be two sizes, got {sizes}", field=fields.field("weight_block_size"))
        return cls((sizes[0], sizes[1]))

    def matrix(self, layer: Layer) -> Matrix | None:
        if layer.dtype("weight") != "F8_E4M3":
            return None
        codes = layer.array("weight", "F8_E4M3")
        rows, columns = codes.shape
        if self.block is None:
            part = "weight_scale" if "weight_scale" in layer else "weight_scale_inv"
            scales = layer.scales(part, (1,), (), (1, 1))
            return fp8_matrix(layer.field(part), codes, (rows, columns), scales.rows)
        shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        scales = layer.scales("weight_scale_inv", shape)
        return fp8_matrix(layer.field("weight_scale_inv"), codes, self.block, scales.rows)
