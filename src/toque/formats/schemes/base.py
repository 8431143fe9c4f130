"""What a pre-quantized checkpoint's scheme is to the reader of folders, and the tensors of one of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.checkpoint import ConvertedRows
from toque.formats.safetensors import StoredTensor

Float32 = npt.NDArray[np.float32]

_NUMPY: Mapping[str, str] = {"I8": "i1", "U8": "u1", "F8_E4M3": "u1", "I32": "<i4", "I64": "<i8"}
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as a GGML type: what becomes a `TensorData`, with its ``column_order``."""

    dtype: str
    shape: tuple[int, int]
    rows: ConvertedRows
    column_order: npt.NDArray[np.int64] | None = None


class Scheme(Protocol):
    """One published layout of quantized linear layers.

    Which layers are quantized is read off the tensors that are there, so that layers left alone (``lm_head``, ignored
    ones) need no list. Nothing but small index tensors is read before a matrix's rows are asked for.
    """

    @property
    def name(self) -> str:
        """For people, with the bits: "GPTQ 4-bit"."""

    def matrix(self, layer: Layer) -> Matrix | None:
        """The layer's weight, or None when it is stored plainly. Raises FormatError naming the tensor at fault."""


class Layer:
    """The stored tensors of one module, by the last part of their names (``qweight``, ``weight_scale`` …).

    ``sortable``: whoever reads the matrix can take its columns in another order (`TensorData.column_order`).
    """

    def __init__(self, module: str, tensors: Mapping[str, StoredTensor], *, sortable: bool = False) -> None:
        self.module = module
        self.sortable = sortable
        self._tensors = tensors

    def __contains__(self, part: str) -> bool:
        return part in self._tensors

    def dtype(self, part: str) -> str:
        """safetensors' type of a tensor, or "" when there is none."""
        return self._tensors[part].dtype if part in self._tensors else ""

    def shape(self, part: str) -> tuple[int, ...]:
        """A tensor's shape. Raises FormatError when it is missing."""
        if part not in self._tensors:
            raise FormatError("the tensor is missing", field=self.field(part))
        return self._tensors[part].shape

    def field(self, part: str) -> str:
        return f"{self.module}.{part}"

    def stored(
        self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> StoredTensor:
        """The tensor, once its type and shape are as the scheme says. ``shape`` None: any matrix without a 0."""
        tensor = self._tensors.get(part)
        if tensor is None:
            raise FormatError("the tensor is missing", field=self.field(part))
        if tensor.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{self.field(part)}: type {tensor.dtype} should be {' or '.join(dtypes)}"
            )
        if shape is None and (len(tensor.shape) != 2 or 0 in tensor.shape):
            raise FormatError(
                f"shape {list(tensor.shape)} should be that of a matrix", field=self.field(part)
            )
        if shape is not None and tensor.shape != shape:
            raise FormatError(f"shape {list(tensor.shape)} should be {list(shape)}", field=self.field(part))
        return tensor

    def array(self, part: str, dtype: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """A view of an integer tensor (FP8 as its bytes)."""
        stored = self.stored(part, (dtype,), shape)
        return stored.raw().reshape(-1).view(_NUMPY[dtype]).reshape(stored.shape)

    def scales(self, part: str, *shapes: tuple[int, ...]) -> Scales:
        """Scales in any float type, of one of the shapes given; they are read as the last of them."""
        stored = self._tensors.get(part)
        wanted = stored.shape if stored is not None and stored.shape in shapes else shapes[0]
        return Scales(self.stored(part, (*FLOATS, "F8_E8M0"), wanted), shapes[-1])


class Scales:
    """A matrix of scales in a file."""

    def __init__(self, stored: StoredTensor, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._stored = stored

    def rows(self, first: int, last: int) -> Float32:
        return self._read(self._bytes()[first:last])

    def columns(self, first: int, last: int) -> Float32:
        return self._read(self._bytes()[:, first:last])

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._stored.raw().reshape(*self.shape, -1)

    def _read(self, data: npt.NDArray[np.uint8]) -> Float32:
        data = np.ascontiguousarray(data)
        kind = self._stored.dtype
        if kind == "F8_E8M0":  # an exponent: 2^(e - 127)
            return np.ldexp(np.float32(1), data[..., 0].astype(np.int32) - 127).astype(np.float32)
        if kind == "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)[..., 0]
        return data.view("<f2" if kind == "F16" else "<f4")[..., 0].astype(np.float32)
