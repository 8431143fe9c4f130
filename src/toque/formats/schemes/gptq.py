"""GPTQ checkpoints, 4 and 8 bit (AutoGPTQ's and GPTQModel's layout).

With P = 32 / bits, K inputs, N outputs and G groups::

    qweight int32 [K/P, N]   field j of word (i, n) is the code of weight (n, i*P + j), lowest bits first
    qzeros  int32 [G, N/P]   zero points, packed along N; stored less one unless checkpoint_format is gptq_v2
    scales  f16   [G, N]
    g_idx   int32 [K]        the group of each input; in order unless the quantizer sorted them (desc_act)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.checkpoint import Bytes
from toque.formats.fields import Fields
from toque.formats.schemes.base import Float32, Layer, Matrix
from toque.formats.schemes.integers import IntegerWeight, unpack_columns, unpack_words

_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GPTQ:
    bits: int
    group_size: int  # 0: one group for all inputs
    symmetric: bool
    zero_offset: int  # what the stored zero points lack

    @property
    def name(self) -> str:
        return f"GPTQ {self.bits}-bit"

    @classmethod
    def read(cls, fields: Fields) -> GPTQ:
        bits = fields.integer("bits")
        if bits not in (4, 8):
            raise UnsupportedModelError(f"{fields.field('bits')}: GPTQ with {bits} bits; Toque reads 4 and 8")
        layout = fields.text("checkpoint_format", "gptq")
        if layout not in _FORMATS or fields.boolean("is_marlin_format", False):
            raise UnsupportedModelError(
                f"{fields.field('checkpoint_format')}: {layout[:40]!a} is not one of {', '.join(_FORMATS)}"
            )
        if fields.text("pack_dtype", "int32") != "int32":
            raise UnsupportedModelError(f"{fields.field('pack_dtype')}: only int32 is supported")
        dynamic = fields.object("dynamic")
        # Patterns that begin with "-:" leave modules alone; the others change bits or groups by module.
        if dynamic is not None and any(not key.startswith("-") for key in dynamic.names()):
            raise UnsupportedModelError(
                f"{fields.field('dynamic')}: settings that differ by module are not supported"
            )
        return cls(
            bits,
            fields.group_size("group_size"),
            fields.boolean("sym", True),
            1 if layout == "gptq" else 0,
        )

    def matrix(self, layer: Layer) -> Matrix | None:
        if "qweight" not in layer:
            return None
        per_word = 32 // self.bits
        words: npt.NDArray[np.int32] = layer.array("qweight", "I32")
        columns, rows = words.shape[0] * per_word, words.shape[1]
        group_size = self.group_size or columns
        n_groups = -(-columns // group_size)
        scales = layer.scales("scales", (n_groups, rows))
        stored_zeros = layer.array("qzeros", "I32", (n_groups, -(-rows // per_word)))

        def codes(first: int, last: int) -> Bytes:
            fields = unpack_words(words[:, first:last], self.bits)
            return fields.transpose(1, 0, 2).reshape(last - first, columns)

        def zeros(first: int, last: int) -> npt.NDArray[np.int16]:
            packed = unpack_columns(stored_zeros, self.bits, first, last)
            return packed.T.astype(np.int16) + np.int16(self.zero_offset)

        def scale_rows(first: int, last: int) -> Float32:
            if self.symmetric and (zeros(first, last) != 1 << (self.bits - 1)).any():
                raise FormatError(
                    f"the configuration says sym, but zero points are not all {1 << (self.bits - 1)}",
                    field=layer.field("qzeros"),
                )
            return scales.columns(first, last).T

        return IntegerWeight(
            layer.field("scales"),
            self.bits,
            (rows, columns),
            group_size,
            codes,
            scale_rows,
            None if self.symmetric else zeros,
            column_groups(layer, "g_idx", columns, group_size),
        ).matrix(sortable=layer.sortable)


def column_groups(layer: Layer, part: str, columns: int, group_size: int) -> npt.NDArray[np.int64] | None:
    """The group of each column, or None when the tensor is absent or says that they are in order."""
    if part not in layer:
        return None
    groups = layer.array(part, "I32", (columns,)).astype(np.int64)
    n_groups = -(-columns // group_size)
    if (groups == np.arange(columns) // group_size).all():
        return None
    if groups.min() < 0 or groups.max() >= n_groups:
        raise FormatError(
            f"holds groups {groups.min()}..{groups.max()}, but there are {n_groups}", field=layer.field(part)
        )
    return groups
