"""Rows of e4m3 values with scales: what is packed is what was meant, in blocks as in the kernels' records."""

from __future__ import annotations

import numpy as np
import pytest

from toque import _native
from toque.backends.cpu.weights import PackedWeights
from toque.formats import dequantize
from toque.formats.checkpoint import TensorData
from toque.formats.e4m3 import E4M3, block_type, pack_f8


@pytest.mark.parametrize(
    ("columns", "span", "kind"),
    [
        (96, 96, "F8_E4M3"),
        (96, 1000, "F8_E4M3"),
        (320, 128, "F8_E4M3"),
        (512, 256, "F8_E4M3"),
        (320, 32, "F8_E4M3_32"),
        (224, 64, "F8_E4M3_32"),
        (416, 160, "F8_E4M3_32"),
    ],
)
def test_rows_mean_code_times_scale(columns: int, span: int, kind: str) -> None:
    random = np.random.default_rng(columns)
    codes = random.integers(0, 127, (20, columns), np.uint8)
    scales = random.uniform(1e-3, 1e5, (20, -(-columns // span))).astype(np.float32)
    assert block_type(columns, span) == kind
    tensor = TensorData("w", kind, (20, columns), pack_f8(codes, scales, span))
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


def test_scales_that_change_within_a_block_do_not_pack() -> None:
    assert block_type(512, 48) == ""
    assert block_type(100, 128) == ""
