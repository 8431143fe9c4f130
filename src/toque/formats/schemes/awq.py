"""AWQ checkpoints in the ``gemm`` layout (4 bit, AutoAWQ's).

With K inputs, N outputs and G groups::

    qweight int32 [K, N/8]   eight outputs to a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
    qzeros  int32 [G, N/8]   the same
    scales  f16   [G, N]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.checkpoint import Bytes
from toque.formats.fields import Fields
from toque.formats.schemes.base import Layer, Matrix
from toque.formats.schemes.integers import IntegerWeight, unpack_words

_FIELD_OF_OUTPUT = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


@dataclass(frozen=True, slots=True)
class AWQ:
    group_size: int  # 0: one group for all inputs
    name: str = "AWQ 4-bit"

    @classmethod
    def read(cls, fields: Fields) -> AWQ:
        bits_key = "bits" if "bits" in fields else "w_bit"
        bits = fields.integer(bits_key)
        if bits != 4:
            raise UnsupportedModelError(f"{fields.field(bits_key)}: AWQ with {bits} bits; Toque reads 4")
        version = fields.text("version", fields.text("format", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModelError(f"{fields.field('version')}: {version[:40]!a}; Toque reads gemm")
        if not fields.boolean("zero_point", True):
            raise UnsupportedModelError(
                f"{fields.field('zero_point')}: AWQ without zero points is not supported"
            )
        return cls(fields.group_size("group_size" if "group_size" in fields else "q_group_size"))

    def matrix(self, layer: Layer) -> Matrix | None:
        if "qweight" not in layer:
            return None
        words: npt.NDArray[np.int32] = layer.array("qweight", "I32")
        columns, rows = words.shape[0], words.shape[1] * 8
        group_size = self.group_size or columns
        if columns % group_size:
            raise FormatError(
                f"{columns} inputs are not whole groups of {group_size}", field=layer.field("qweight")
            )
        scales = layer.scales("scales", (columns // group_size, rows))
        stored_zeros = layer.array("qzeros", "I32", (columns // group_size, rows // 8))
        return IntegerWeight(
            layer.field("scales"),
            4,
            (rows, columns),
            group_size,
            lambda first, last: _outputs(words, first, last),
            lambda first, last: scales.columns(first, last).T,
            lambda first, last: _outputs(stored_zeros, first, last),
        ).matrix()


def _outputs(words: npt.NDArray[np.int32], first: int, last: int) -> Bytes:
    """Codes of outputs ``first:last``: uint8 (last - first, rows of words)."""
    start = first // 8
    fields = unpack_words(words[:, start : -(-last // 8)], 4)[..., _FIELD_OF_OUTPUT]
    return fields.reshape(len(words), -1)[:, first - 8 * start : last - 8 * start].T
