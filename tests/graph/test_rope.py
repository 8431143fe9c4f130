"""Rotary frequencies against published formulas and check values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toque.errors import FormatError, UnsupportedModelError
from toque.graph.rope import rope_spec
from toque.types import RopeScaling

LLAMA3 = RopeScaling("llama3", factor=32.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_llama3_scaling_has_the_known_ratios():
    """Field case BR-055: head_dim 64, theta 5e5, factor 32, 1/4, original context 8192."""
    ratio = rope_spec(5e5, 64, LLAMA3).inv_freq / rope_spec(5e5, 64).inv_freq
    np.testing.assert_array_equal(ratio[:15], 1.0)
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], atol=5e-6)
    np.testing.assert_allclose(ratio[18:], 0.03125, rtol=1e-12)


def test_plain_frequencies_run_from_one_to_nearly_one_over_theta():
    spec = rope_spec(10000.0, 8)
    np.testing.assert_allclose(spec.inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)
    assert spec.inv_freq.dtype == np.float64
    assert spec.mscale == 1.0


def test_linear_scaling_divides_every_frequency():
    scaled = rope_spec(10000.0, 8, RopeScaling("linear", factor=4.0))
    np.testing.assert_allclose(scaled.inv_freq * 4.0, rope_spec(10000.0, 8).inv_freq, rtol=1e-12)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    scaling = RopeScaling("yarn", factor=4.0, original_context=4096)
    spec, plain = rope_spec(10000.0, 128, scaling), rope_spec(10000.0, 128)
    ratio = spec.inv_freq / plain.inv_freq
    turns = 4096 * plain.inv_freq / (2 * math.pi)
    assert (ratio[turns > 40] == 1.0).all()
    np.testing.assert_allclose(ratio[turns < 0.8], 0.25, rtol=1e-12)
    assert (np.diff(ratio) <= 0).all()
    assert spec.mscale == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_factors_divide_each_frequency_and_replace_the_scaling():
    spec = rope_spec(10000.0, 8, LLAMA3, factors=np.array([1, 2, 4, 8], np.float32))
    np.testing.assert_allclose(spec.inv_freq, [1.0, 0.05, 0.0025, 0.000125], rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((10000.0, 7), "rope_dim"),
        ((0.0, 8), "rope_theta"),
        ((math.nan, 8), "rope_theta"),
        ((1e4, 8, RopeScaling("dynamic", factor=2.0)), "rope_scaling.rope_type"),
        ((1e4, 8, RopeScaling("linear", factor=0.0)), "rope_scaling.factor"),
        ((1e4, 8, RopeScaling("yarn", factor=2.0)), "rope_scaling.original_max_position_embeddings"),
        (
            (1e4, 8, RopeScaling("llama3", factor=2.0, original_context=32, high_freq_factor=1.0)),
            "rope_scaling",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name(arguments, field):
    with pytest.raises(UnsupportedModelError) as caught:
        rope_spec(*arguments)
    assert caught.value.param == field


def test_long_rope_takes_its_factors_by_the_context_served():
    scaling = RopeScaling(
        "longrope",
        original_context=64,
        attention_factor=1.25,
        long_factors=(4.0, 8.0),
        short_factors=(1.0, 2.0),
    )
    short, long = (rope_spec(1e4, 4, scaling, context=context) for context in (64, 65))
    np.testing.assert_allclose(short.inv_freq, [1.0, 1e-2 / 2])
    np.testing.assert_allclose(long.inv_freq, [1.0 / 4, 1e-2 / 8])
    assert short.mscale == long.mscale == 1.25
    with pytest.raises(FormatError, match=r"rope_scaling\.short_factor"):
        rope_spec(1e4, 8, scaling, context=64)


@pytest.mark.parametrize("factors", [[1.0, 1.0], [1, 1, 1, 0.0], [1, 1, 1, math.inf]])
def test_bad_factors_name_their_tensor(factors):
    with pytest.raises(FormatError, match=r"rope_freqs\.weight"):
        rope_spec(10000.0, 8, factors=factors)
