"""Linear kernels against float64 products, and bit for bit against themselves in every other arrangement."""

from __future__ import annotations

import numpy as np
import pytest

from toque import _native
from toque.formats.blocks import BY_NAME

from .sources import ALL_TYPES, F8_TYPES, FLOAT_TYPES, INTEGER_TYPES, columns, raw_rows
from .test_pack import all_rows, pack

ISAS = _native.isas()


def inputs(tokens, width, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, width), dtype=np.float32)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def assert_same_bits(left, right):
    np.testing.assert_array_equal(bits(left), bits(right))


def exact(isa, dtype, weight, x):
    """The product in float64 of exactly what the kernel multiplies: dequantized weights, quantized activations."""
    if dtype in INTEGER_TYPES:
        x = _native.quantize(isa, x)
    elif dtype == "BF16" and isa.startswith("avx512"):  # to nearest even
        x = (bits(x) + 0x7FFF + (bits(x) >> 16 & 1) & 0xFFFF0000).view(np.float32)
    return x.astype(np.float64) @ all_rows(isa, weight).astype(np.float64).T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_equals_the_float64_product(dtype, isa):
    """Only f32 accumulation separates them: a few units in the last place per group."""
    for rows, groups in ((16, 1), (50, 3)):
        cols = columns(dtype) * groups
        weight = pack(dtype, raw_rows(dtype, rows, cols), cols)
        x = inputs(7, cols)
        expected = exact(isa, dtype, weight, x)
        np.testing.assert_allclose(
            _native.linear(isa, weight, x), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_int8_activations_cost_what_their_rounding_explains(dtype, isa):
    """Rounding to 1/127 of a group's maximum is uniform noise of step / sqrt(12), about 0.6 % of a normal vector."""
    cols = 512
    weight = pack(dtype, raw_rows(dtype, 64, cols), cols)
    x = inputs(8, cols)
    product = x @ all_rows(isa, weight).T
    error = _native.linear(isa, weight, x) - product
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(product**2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_a_token_alone_gives_the_bits_it_gives_in_a_batch(dtype, isa):
    cols = columns(dtype)
    weight = pack(dtype, raw_rows(dtype, 40, cols), cols)
    x = inputs(40, cols)
    alone = np.concatenate([_native.linear(isa, weight, x[i : i + 1]) for i in range(len(x))])
    for tokens in [*range(2, 27), 31, 40]:
        assert_same_bits(_native.linear(isa, weight, x[:tokens]), alone[:tokens])
    assert_same_bits(_native.linear(isa, weight, x[5:24]), alone[5:24])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_splits_of_the_outputs_change_nothing(isa, chunk):
    weight, up = (pack("Q4_1", raw_rows("Q4_1", 112, 96, seed), 96) for seed in (0, 1))
    x = inputs(9, 96)
    assert_same_bits(_native.linear(isa, weight, x, chunk=chunk), _native.linear(isa, weight, x))
    gated = _native.linear(isa, weight, x, up=up, activation="silu")
    assert_same_bits(_native.linear(isa, weight, x, up=up, activation="silu", chunk=chunk), gated)


def same_bits_everywhere(dtype, isa):
    """All but AVX-512's bf16 pairs, which the hardware rounds on its own terms."""
    return not (dtype == "BF16" and isa.startswith("avx512"))


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [(d, i) for d in ALL_TYPES for i in ISAS if i != "scalar" and same_bits_everywhere(d, i)],
)
def test_every_instruction_set_gives_the_same_bits(dtype, isa):
    cols = 3 * columns(dtype)  # an odd number of blocks: records and half a record
    weight = pack(dtype, raw_rows(dtype, 33, cols), cols)
    for tokens in (1, 3, 4, 5, 6, 7, 9, 13):
        x = inputs(tokens, cols, tokens)
        assert_same_bits(_native.linear(isa, weight, x), _native.linear("scalar", weight, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_extreme_codes_do_not_overflow(dtype, isa):
    """All codes at their largest against activations at +-127: the sums AVX2 keeps in 16 bits are at their worst.

    A wrapped sum would be off by 2^16 / 127 times a scale of 0.02: by several units.
    """
    cols = columns(dtype)
    raw = raw_rows(dtype, 16, cols)
    size = BY_NAME[dtype].nbytes
    blocks = raw.reshape(16, -1, size)
    codes = {"Q6_K": (0, 192), "Q2_K": (16, 80), "Q3_K": (0, 96), "IQ4_XS": (8, 136), "MXFP4": (1, 17)}
    codes |= {"Q4_K": (16, 144), "Q5_K": (16, 176), "Q8_Z": (4, 36)}
    first, last = codes.get(dtype, (4 if dtype.endswith("_1") else 2, size))
    for fill in (0xFF, 0x00, 0x7F, 0x80, 0x77):
        blocks[:, :, first:last] = fill
        weight = pack(dtype, raw, cols)
        for sign in (1.0, -1.0):
            for tokens in (1, 6, 13):
                x = np.full((tokens, cols), sign, dtype=np.float32)
                expected = exact(isa, dtype, weight, x)
                np.testing.assert_allclose(_native.linear(isa, weight, x), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [48, 41])
def test_bias_and_residual(isa, rows):
    weight = pack("Q5_0", raw_rows("Q5_0", rows, 64), 64)
    x, bias, residual = inputs(5, 64), inputs(1, rows, 1)[0], inputs(5, rows, 2)
    plain = _native.linear(isa, weight, x)
    assert_same_bits(_native.linear(isa, weight, x, bias=bias), plain + bias)
    assert_same_bits(_native.linear(isa, weight, x, bias=bias, residual=residual), residual + (plain + bias))


def activation(name, v):
    v = v.astype(np.float64)
    if name == "silu":
        return v / (1 + np.exp(-v))
    if name == "gelu_tanh":
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    from math import erf

    return 0.5 * v * (1 + np.vectorize(erf)(v / np.sqrt(2)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("rows", [96, 77])
def test_gated_and_activated_epilogues(isa, name, rows):
    gate, up = (pack("Q8_0", raw_rows("Q8_0", rows, 64, seed), 64) for seed in (0, 1))
    x, bias, up_bias = inputs(8, 64), inputs(1, rows, 3)[0], inputs(1, rows, 4)[0]
    y, u = _native.linear(isa, gate, x, bias=bias), _native.linear(isa, up, x, bias=up_bias)
    expected = activation(name, y)
    got = _native.linear(isa, gate, x, bias=bias, activation=name, activated=True)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * np.abs(y).max())
    got = _native.linear(isa, gate, x, bias=bias, up=up, up_bias=up_bias, activation=name)
    np.testing.assert_allclose(got, expected * u, rtol=2e-6, atol=2e-6 * np.abs(y * u).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [96, 77])
def test_gated_output_goes_packed_to_the_next_linear(isa, rows):
    gate, up = (pack("Q4_0", raw_rows("Q4_0", rows, 64, seed), 64) for seed in (0, 1))
    x = inputs(15, 64)
    values = _native.linear(isa, gate, x, up=up, activation="silu")
    packed = _native.linear(isa, gate, x, up=up, activation="silu", to_act=True)
    assert_same_bits(packed, _native.quantize(isa, values) if rows % 32 == 0 else values)


@pytest.mark.parametrize("isa", ISAS)
def test_quantized_activations_stay_within_half_a_step(isa):
    x = inputs(5, 96)
    x[2] = 0
    x[3, :32] *= 1e-34  # so small that its group counts as zero
    got = _native.quantize(isa, x)
    step = np.abs(x.reshape(5, 3, 32)).max(axis=2, keepdims=True) / 127
    assert np.all(np.abs(got - x).reshape(5, 3, 32) <= step * 0.5001 + 1e-30)
    assert_same_bits(got, _native.quantize("scalar", x))


def with_peaks(tokens, cols):
    """Groups with one loud quad each, another one for every token and group: here by 4, there by up to 100,000."""
    x = inputs(tokens, cols)
    for token in range(tokens):
        for group in range(cols // 32):
            quad = (3 * token + 5 * group) % 8
            x[token, 32 * group + 4 * quad + token % 4] *= (1.0, 8.0, 100.0, 1e5)[(token + group) % 4]
    return x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGER_TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 6, 29])
def test_peaks_count_in_full(dtype, isa, tokens):
    cols = max(columns(dtype), 96)
    weight = pack(dtype, raw_rows(dtype, 40, cols), cols)
    x = with_peaks(tokens, cols)
    expected, got = exact(isa, dtype, weight, x), _native.linear(isa, weight, x)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    assert_same_bits(got, _native.linear("scalar", weight, x))


@pytest.mark.parametrize("isa", ISAS)
def test_a_peak_leaves_its_group_its_precision(isa):
    """The step follows the second loudest quad, down to a 128th of the loudest."""
    x = with_peaks(24, 96)
    groups = np.abs(x).reshape(24, 3, 8, 4)
    first, second = np.sort(groups.max(axis=3), axis=2)[..., :-3:-1].transpose(2, 0, 1)
    step = np.where(first > 2 * second, np.maximum(second, first / 128), first) / 127
    error = np.abs(_native.quantize(isa, x) - x).reshape(24, 3, 32).max(axis=2)
    assert np.all(error <= step * 0.5001 + 1e-6 * first)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["Q4_1", "F16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_spoils_only_itself(dtype, isa, poison):
    cols = columns(dtype)
    weight = pack(dtype, raw_rows(dtype, 16, cols), cols)
    x = inputs(5, cols)
    clean = _native.linear(isa, weight, x)
    x[2, 1] = poison
    got = _native.linear(isa, weight, x)
    assert not np.isfinite(got[2]).any()
    assert_same_bits(np.delete(got, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("dtype", sorted({*FLOAT_TYPES} - {*F8_TYPES}))
def test_odd_widths_of_float_weights(dtype):
    for cols in (1, 2, 31, 33, 65):
        weight = pack(dtype, raw_rows(dtype, 3, cols), cols)
        for isa in ISAS:
            x = inputs(3, cols)
            expected = exact(isa, dtype, weight, x)
            np.testing.assert_allclose(_native.linear(isa, weight, x), expected, rtol=2e-6, atol=1e-5)


def test_no_tokens_is_no_work():
    weight = pack("Q4_0", raw_rows("Q4_0", 16, 32), 32)
    assert _native.linear("", weight, np.empty((0, 32), dtype=np.float32)).shape == (0, 16)
