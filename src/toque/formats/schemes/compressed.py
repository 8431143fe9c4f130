"""compressed-tensors checkpoints: integers of 4 and 8 bits, packed or plain, and FP8.

A layer's tensors say how it is stored (N outputs, K inputs, G groups, P = 32 / bits)::

    weight_packed      int32 [N, K/P]   codes plus 2^(bits-1), lowest bits first, along K
    weight_shape       int64 [2]        N, K
    weight_zero_point  int32 [N/P, G]   packed likewise, along N (asymmetric only)
    weight_g_idx       int32 [K]        the group of each input (actorder "group" only)

    weight             int8 [N, K] with weight_zero_point int8 like the scale, or F8_E4M3 [N, K]

    weight_scale       [N, G], [N, 1] (channel), [1] (tensor), or a scale for each block (FP8)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.fields import Fields
from toque.formats.schemes.base import FLOATS, Float32, Layer, Matrix, Scales
from toque.formats.schemes.floats import fp8_matrix
from toque.formats.schemes.gptq import column_groups
from toque.formats.schemes.integers import IntegerWeight, unpack_columns, unpack_words

_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
_STRATEGIES = ("block", "channel", "group", "tensor")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """``blocks`` are the block sizes that the configuration names, for FP8 scales by block."""

    name: str
    blocks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> CompressedTensors:
        _check_format(fields, "format")
        sparsity = fields.object("sparsity_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise UnsupportedModelError(
                f"{sparsity.field('format')}: sparse weights ({sparsity.text('format')[:40]!a}) are not supported"
            )
        transforms = fields.object("transform_config")
        if transforms is not None and transforms.names():
            raise UnsupportedModelError(f"{fields.field('transform_config')}: transforms are not supported")
        groups = fields.object("config_groups")
        if groups is None:
            raise FormatError("is missing", field=fields.field("config_groups"))
        kinds: list[str] = []
        blocks: list[tuple[int, int]] = []
        for key in groups.names():
            group = groups.object(key)
            weights = None if group is None else group.object("weights")
            if group is None or weights is None:
                continue
            _check_format(group, "format")
            kinds.append(_kind(weights, activations="input_activations" in group))
            if weights.text("strategy", "tensor") == "block":
                blocks.append(_block(weights))
        return cls("compressed-tensors " + (" + ".join(dict.fromkeys(kinds)) or "dense"), tuple(blocks))

    def matrix(self, layer: Layer) -> Matrix | None:
        if "weight_packed" in layer:
            return _packed(layer)
        if "weight_scale" not in layer or layer.dtype("weight") in FLOATS:
            return None
        if layer.dtype("weight") == "F8_E4M3":
            return self._fp8(layer)
        codes: npt.NDArray[np.int8] = layer.array("weight", "I8")
        scales, group_size = _scales(layer, *codes.shape)
        zeros: npt.NDArray[np.int8] | None = None
        if "weight_zero_point" in layer:
            stored = layer.array("weight_zero_point", "I8", layer.shape("weight_scale"))
            zeros = np.broadcast_to(stored.reshape(scales.shape), (codes.shape[0], scales.shape[1]))

        def zero_rows(first: int, last: int) -> npt.NDArray[np.int16]:
            assert zeros is not None
            return zeros[first:last].astype(np.int16) + np.int16(128)

        return IntegerWeight(
            layer.field("weight_scale"),
            8,
            (codes.shape[0], codes.shape[1]),
            group_size,
            lambda first, last: codes[first:last].view(np.uint8) ^ np.uint8(0x80),
            lambda first, last: _rows_of(scales, first, last),
            None if zeros is None else zero_rows,
        ).matrix()

    def _fp8(self, layer: Layer) -> Matrix:
        codes = layer.array("weight", "F8_E4M3")
        rows, columns = codes.shape
        for block in self.blocks:
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            if layer.shape("weight_scale") == shape:
                scales = layer.scales("weight_scale", shape)
                return fp8_matrix(layer.field("weight_scale"), codes, block, scales.rows)
        scales, group_size = _scales(layer, rows, columns)
        height = rows if scales.shape[0] == 1 else 1
        return fp8_matrix(layer.field("weight_scale"), codes, (height, group_size), scales.rows)


def _check_format(fields: Fields, key: str) -> None:
    layout = fields.text(key, "dense")
    if layout not in _FORMATS:
        raise UnsupportedModelError(
            f"{fields.field(key)}: compressed-tensors {layout[:40]!a} is not supported; Toque reads "
            + ", ".join(_FORMATS)
        )


def _kind(weights: Fields, *, activations: bool) -> str:
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise UnsupportedModelError(
            f"{weights.field('num_bits')}: {kind[:20]} weights of {bits} bits; Toque reads int 4, int 8, float 8"
        )
    strategy = weights.text("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise UnsupportedModelError(
            f"{weights.field('strategy')}: {strategy[:40]!a} is not one of {', '.join(_STRATEGIES)}"
        )
    if kind == "float":
        return "FP8"
    return f"W{bits}A{8 if activations else 16}"


def _block(weights: Fields) -> tuple[int, int]:
    sizes = weights.integers("block_structure")
    if len(sizes) != 2 or 0 in sizes:
        raise FormatError(f"must be two sizes, got {sizes}", field=weights.field("block_structure"))
    return sizes[0], sizes[1]


def _packed(layer: Layer) -> Matrix:
    words: npt.NDArray[np.int32] = layer.array("weight_packed", "I32")
    rows, columns = (int(size) for size in layer.array("weight_shape", "I64", (2,)))
    bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), 0)
    if not bits or rows < 1 or columns < 1:
        raise FormatError(
            f"shape {list(words.shape)} does not hold {rows} x {columns} codes of 4 or 8 bits",
            field=layer.field("weight_packed"),
        )
    per_word = 32 // bits
    scales, group_size = _scales(layer, rows, columns)
    zero_words: npt.NDArray[np.int32] | None = None
    if "weight_zero_point" in layer:
        zero_words = layer.array("weight_zero_point", "I32", (-(-rows // per_word), scales.shape[1]))

    def zeros(first: int, last: int) -> npt.NDArray[np.uint8]:
        assert zero_words is not None
        return unpack_columns(zero_words.T, bits, first, last).T

    return IntegerWeight(
        layer.field("weight_scale"),
        bits,
        (rows, columns),
        group_size,
        lambda first, last: unpack_words(words[first:last], bits).reshape(last - first, -1)[:, :columns],
        lambda first, last: _rows_of(scales, first, last),
        None if zero_words is None else zeros,
        column_groups(layer, "weight_g_idx", columns, group_size),
    ).matrix(sortable=layer.sortable)


def _scales(layer: Layer, rows: int, columns: int) -> tuple[Scales, int]:
    """Scales as a matrix of ``rows`` rows, or of one for the whole weight, and the columns that share one."""
    shape = layer.shape("weight_scale")
    if shape in ((), (1,), (1, 1)):
        return layer.scales("weight_scale", shape, (1, 1)), columns
    n_groups = shape[1] if len(shape) == 2 and shape[1] else 1
    if columns % n_groups:
        raise FormatError(
            f"{n_groups} groups do not divide {columns} inputs", field=layer.field("weight_scale")
        )
    return layer.scales("weight_scale", (rows, n_groups), (rows,), (rows, n_groups)), columns // n_groups


def _rows_of(scales: Scales, first: int, last: int) -> Float32:
    if scales.shape[0] == 1:
        return np.repeat(scales.rows(0, 1), last - first, axis=0)
    return scales.rows(first, last)
