"""Matrices that a checkpoint stores as one and the graph knows as several."""

from __future__ import annotations

from collections.abc import Mapping

from toque.errors import FormatError
from toque.formats.checkpoint import TensorData


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
            name, tensor.dtype, (count, tensor.shape[1]), tensor.raw[start : start + count]
        )
        start += count
    return result
