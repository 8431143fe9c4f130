"""Packs a checkpoint's matrices, straight from its mapped file, into one arena of the native kernels' layout."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toque import _native
from toque.backends.base import Float32
from toque.errors import FormatError, UnsupportedModelError
from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import TensorData
from toque.formats.dequant import dequantize


@dataclass(frozen=True, slots=True)
class Reader:
    """A matrix as a reader of activations. ``order`` lists the column that each of its inputs is, None: as they come.

    Readers with the same ``orders`` number have the same order; 0 stands for none.
    """

    matrix: _native.PackedMatrix
    order: npt.NDArray[np.int64] | None = None
    orders: int = 0


class PackedWeights:
    """The packed form of the ``matrices`` named; vectors (norms, biases) stay float32 and are read on demand.

    A matrix that is used twice (tied embeddings) is packed once, a layer's experts as a matrix for each. A type without
    a packed form raises `UnsupportedModelError` naming the tensor.
    """

    def __init__(self, tensors: Mapping[str, TensorData], matrices: Collection[str], threads: int) -> None:
        self._tensors = tensors
        parts = {name: _matrices(tensors[name]) for name in dict.fromkeys(matrices)}
        sizes = [self._packed_size(part) for tensor in parts.values() for part in tensor]
        self.arena = _native.Arena(sum(sizes) + 64 * len(sizes))
        self._packed = {
            name: [self._pack(part, threads) for part in tensor] for name, tensor in parts.items()
        }
        self._orders: dict[bytes, int] = {}
        for tensor in tensors.values():
            for part in (tensor, *tensor.parts):
                _forget_pages(part)

    def matrix(self, name: str) -> _native.PackedMatrix:
        (matrix,) = self._packed[name]
        return matrix

    def reader(self, name: str) -> Reader:
        order = self._tensors[name].column_order
        if order is None:
            return Reader(self.matrix(name))
        return Reader(
            self.matrix(name), order, self._orders.setdefault(order.tobytes(), len(self._orders) + 1)
        )

    def experts(self, name: str) -> list[_native.PackedMatrix]:
        return self._packed[name]

    def expert_orders(self, name: str) -> list[npt.NDArray[np.int64]]:
        """The column that each input of an expert is, none for as they come; empty where all come so."""
        orders = [part.column_order for part in self._tensors[name].parts]
        none = np.empty(0, np.int64)
        if all(order is None for order in orders):
            return []
        return [none if order is None else order for order in orders]

    def vector(self, name: str) -> Float32:
        return np.ascontiguousarray(dequantize(self._tensors[name]).reshape(-1), np.float32)

    @staticmethod
    def _packed_size(tensor: TensorData) -> int:
        try:
            return _native.packed_size(tensor.dtype, *tensor.shape)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{tensor.name} ({tensor.dtype}): {error}", param=tensor.name
            ) from None

    def _pack(self, tensor: TensorData, threads: int) -> _native.PackedMatrix:
        raw = np.ascontiguousarray(tensor.raw)
        if tensor.dtype == "MXFP4":
            _check_exponents(raw, tensor.name)
        return _native.pack(self.arena, tensor.dtype, raw, tensor.shape[1], tensor.row_order, threads)


def _matrices(tensor: TensorData) -> tuple[TensorData, ...]:
    return tensor.experts() if len(tensor.shape) == 3 else (tensor,)


def _check_exponents(raw: npt.NDArray[np.uint8], name: str) -> None:
    """MXFP4's scales are powers of two, 2^(e - 127), and packed as float16 of half of them."""
    if raw.reshape(-1, BY_NAME["MXFP4"].nbytes)[:, 0].max(initial=0) > 128 + 15:
        raise FormatError("holds values beyond float16's 65504", field=name)


def _forget_pages(tensor: TensorData) -> None:
    """Lets the kernel drop the file's pages from this process: only the packed copy is read from here on."""
    owner: object = tensor.raw
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
