"""Packing: nothing of a weight's meaning is lost, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest

from toque import _native

from .sources import ALL_TYPES, K_TYPES, columns, raw_rows, values_of


def pack(dtype, raw, cols, **options):
    rows = len(options.get("row_order", raw))
    return _native.pack(_native.Arena(_native.packed_size(dtype, rows, cols)), dtype, raw, cols, **options)


def all_rows(isa, weight):
    return _native.embed(isa, weight, np.arange(weight.rows, dtype=np.int32))


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_packed_rows_dequantize_to_what_the_file_says(dtype, rows, isa):
    cols = columns(dtype)
    raw = raw_rows(dtype, rows, cols)
    expected, got = values_of(dtype, raw), all_rows(isa, pack(dtype, raw, cols))
    if dtype in K_TYPES:  # scale and min products are rounded to f16: 2^-11 of each term
        np.testing.assert_allclose(got, expected, rtol=0, atol=2**-11 * np.abs(expected).max() * 2)
    else:  # one rounding (fused) against two
        np.testing.assert_allclose(got, expected, rtol=3e-7, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_row_order_selects_source_rows(dtype):
    cols = columns(dtype)
    raw = raw_rows(dtype, 40, cols)
    order = np.random.default_rng(1).permutation(40)[:33].astype(np.int64)
    plain, ordered = pack(dtype, raw, cols), pack(dtype, raw, cols, row_order=order)
    np.testing.assert_array_equal(all_rows("scalar", ordered), all_rows("scalar", plain)[order])


def test_threads_pack_the_same():
    raw = raw_rows("Q4_1", 100, 128)
    one, three = pack("Q4_1", raw, 128), pack("Q4_1", raw, 128, threads=3)
    np.testing.assert_array_equal(all_rows("scalar", one), all_rows("scalar", three))


def test_embedding_scale_multiplies_rows():
    raw = raw_rows("Q8_0", 16, 64)
    weight = pack("Q8_0", raw, 64)
    ids = np.array([3, 3, 0], dtype=np.int32)
    scaled = _native.embed("", weight, ids, 2.0)
    np.testing.assert_array_equal(scaled, 2 * _native.embed("", weight, ids))


def test_wrong_inputs_are_named():
    arena = _native.Arena(1 << 16)
    raw = raw_rows("Q4_0", 4, 64)
    with pytest.raises(ValueError, match="IQ2_XXS has no packed format"):
        _native.packed_size("IQ2_XXS", 4, 256)
    with pytest.raises(ValueError, match="multiple of 32 columns, not 40"):
        _native.packed_size("Q4_0", 4, 40)
    with pytest.raises(ValueError, match="have 54 bytes, not 36"):
        _native.pack(arena, "Q4_0", raw, 96)
    with pytest.raises(IndexError, match=r"row_order\[1\] is 4, of 4 rows"):
        _native.pack(arena, "Q4_0", raw, 64, np.array([0, 4], dtype=np.int64))
    with pytest.raises(IndexError, match="row 16 of 16"):
        _native.embed("", pack("Q4_0", raw_rows("Q4_0", 16, 64), 64), np.array([16], dtype=np.int32))


def test_a_full_arena_refuses():
    raw = raw_rows("Q4_0", 16, 64)
    arena = _native.Arena(_native.packed_size("Q4_0", 16, 64))
    _native.pack(arena, "Q4_0", raw, 64)
    with pytest.raises((ValueError, RuntimeError), match="arena of 576 bytes is full"):
        _native.pack(arena, "Q4_0", raw, 64)
