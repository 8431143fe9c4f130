"""Matrices that a checkpoint stores as one and the graph knows as several, and others that go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError
from toque.formats.checkpoint import TensorData
from toque.formats.dequant import dequantize
from toque.formats.quantize import as_type


def split_rows(tensor: TensorData, prefix: str, rows: Mapping[str, int]) -> dict[str, TensorData]:
    """Cut a fused matrix into ``prefix.<name>.weight`` views of the given row counts, in order."""
    total = sum(rows.values())
    if len(tensor.shape) != 2 or tensor.shape[0] != total:
        raise FormatError(
            f"shape {list(tensor.shape)} should have {total} rows: {dict(rows)}", field=tensor.name
        )
    result: dict[str, TensorData] = {}
    start = 0
    for part, count in rows.items():
        name = f"{prefix}.{part}.weight"
        result[name] = TensorData(
            name,
            tensor.dtype,
            (count, tensor.shape[1]),
            tensor.raw[start : start + count],
            column_order=tensor.column_order,
        )
        start += count
    return result


_EXPERT = re.compile(r"(blk\.\d{1,5}\.ffn_(?:gate|up|down))\.(\d{1,4})\.weight")


def stack_experts(tensors: Mapping[str, TensorData], n_experts: int) -> dict[str, TensorData]:
    """Join ``blk.0.ffn_up.<expert>.weight`` matrices into ``blk.0.ffn_up_exps.weight``, without a copy.

    Raises FormatError naming an expert that is missing, or differs in shape or type from its layer's first.
    """
    result: dict[str, TensorData] = {}
    groups: dict[str, dict[int, TensorData]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            groups.setdefault(match[1], {})[int(match[2])] = tensor
    for stem, experts in groups.items():
        first = next(iter(experts.values()))
        parts = []
        for number in range(n_experts):
            part = experts.get(number)
            if part is None:
                raise FormatError("the tensor is missing", field=f"{stem}.{number}.weight")
            if part.shape != first.shape or len(part.shape) != 2:
                raise FormatError(f"shape {list(part.shape)} should be {list(first.shape)}", field=part.name)
            parts.append(part)
        if len({part.dtype for part in parts}) > 1:
            raise FormatError("the experts of a layer must have one type", field=first.name)
        name = f"{stem}_exps.weight"
        empty = np.empty((0, first.raw.shape[1]), np.uint8)
        result[name] = TensorData(name, first.dtype, (n_experts, *first.shape), empty, parts=tuple(parts))
    return result


def settle_column_orders(tensors: Mapping[str, TensorData], n_layers: int) -> dict[str, TensorData]:
    """Give a feed-forward's hidden units the order in which ``ffn_down`` stores their columns.

    Gate and up then produce them in that order, and nothing has to be sorted in a step. The model is the same. Of
    experts likewise; where an expert's gate and up want their inputs in two orders, the layer's become F16.
    """
    result = dict(tensors)
    for layer in range(n_layers):
        if f"blk.{layer}.ffn_down_exps.weight" in result:
            result.update(_settled_experts(result, f"blk.{layer}"))
            continue
        name = f"blk.{layer}.ffn_down.weight"
        down = result.get(name)
        if down is None or down.column_order is None:
            continue
        result[name] = replace(down, column_order=None)
        for part in ("ffn_gate", "ffn_up"):
            for kind in ("weight", "bias"):
                tensor = result.get(f"blk.{layer}.{part}.{kind}")
                if tensor is not None:
                    result[tensor.name] = _rows_by(tensor, down.column_order)
    return result


def _settled_experts(tensors: Mapping[str, TensorData], prefix: str) -> dict[str, TensorData]:
    whole = [tensors[f"{prefix}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
    if any(not tensor.parts for tensor in whole):  # stacked in the file, whose type has no orders
        return {}
    gates, ups, downs = [], [], []
    for gate, up, down in zip(*(tensor.parts for tensor in whole), strict=True):
        order = down.column_order
        gates.append(gate if order is None else _rows_by(gate, order))
        ups.append(up if order is None else _rows_by(up, order))
        downs.append(replace(down, column_order=None))
    if not all(_same(gate.column_order, up.column_order) for gate, up in zip(gates, ups, strict=True)):
        gates, ups = ([as_type(part, "F16") for part in parts] for parts in (gates, ups))
    return {
        tensor.name: replace(tensor, dtype=parts[0].dtype, parts=tuple(parts), raw=parts[0].raw[:0])
        for tensor, parts in zip(whole, (gates, ups, downs), strict=True)
    }


def _same(one: npt.NDArray[np.int64] | None, other: npt.NDArray[np.int64] | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _rows_by(tensor: TensorData, order: npt.NDArray[np.int64]) -> TensorData:
    if len(tensor.shape) == 2:
        return replace(tensor, row_order=order if tensor.row_order is None else tensor.row_order[order])
    values = np.ascontiguousarray(dequantize(tensor)[order])
    return TensorData(tensor.name, "F32", tensor.shape, values.view(np.uint8).reshape(1, -1))
