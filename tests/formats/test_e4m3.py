"""Rows of e4m3 values with scales: what is packed is what was meant, in blocks as in the kernels' records."""

from __future__ import annotations

import numpy as np
import pytest

from toque import _native
from toque.backends.cpu.weights import PackedWeights
from toque.formats import dequantize
from toque.formats.checkpoint import TensorData
from toque.formats.e4m3 import E4M3, pack_f8, packs


@pytest.mark.parametrize(("columns", "span"), [(96, 96), (96, 1000), (320, 128), (512, 256)])
def test_rows_mean_code_times_scale(columns: int, span: int) -> None:
    random = np.random.default_rng(columns)
    codes = random.integers(0, 127, (20, columns), np.uint8)
    scales = random.uniform(1e-3, 1e5, (20, -(-columns // span))).astype(np.float32)
    assert packs(columns, span)
    tensor = TensorData("w", "F8_E4M3", (20, columns), pack_f8(codes, scales, span))
    meant = E4M3[codes] * np.repeat(scales, span, axis=1)[:, :columns]
    np.testing.assert_array_equal(dequantize(tensor), meant)
    packed = PackedWeights({"w": tensor}, ["w"], 1).matrix("w")
    rows = _native.embed("", packed, np.arange(20, dtype=np.int32))
    np.testing.assert_allclose(rows, meant, rtol=1e-6)


def test_a_nan_is_not_read_as_a_number() -> None:
    codes = np.zeros((1, 64), np.uint8)
    codes[0, 5] = 0xFF
    tensor = TensorData("w", "F8_E4M3", (1, 64), pack_f8(codes, np.ones((1, 1), np.float32), 64))
    packed = PackedWeights({"w": tensor}, ["w"], 1).matrix("w")
    assert np.isnan(dequantize(tensor)[0, 5])
    assert np.isnan(_native.linear(_native.resolve_isa(""), packed, np.ones((1, 64), np.float32))).all()


def test_scales_that_change_within_a_record_do_not_pack() -> None:
    assert not packs(512, 32)
    assert not packs(100, 128)
