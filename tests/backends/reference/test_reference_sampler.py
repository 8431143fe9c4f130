"""The sampler's semantics, case by case, on vocabularies small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from toque.backends.reference.sampler import Sampler, log_softmax, philox, top_alternatives, uniform
from toque.types import SamplingParams

INF = np.inf


def sampler(vocab=4, valid=None, prompt=(), output=(), suppress=(), suppress_until=0, **params):
    return Sampler(
        vocab,
        valid or vocab,
        SamplingParams(**({"seed": 0} | params)),
        prompt,
        output,
        suppress,
        suppress_until,
    )


def sample(logits, mask=None, **kwargs):
    return sampler(len(logits), **kwargs).sample(np.array(logits, np.float32), mask)


def survivors(logits, **params):
    """The ids that are drawn by any of 300 seeds."""
    return {sample(logits, seed=seed, **params) for seed in range(300)}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    assert philox(counter, key) == expected


def test_uniform_numbers_are_uniform_and_differ_between_seeds_and_indices():
    numbers = np.array([uniform(seed, index) for seed in range(-20, 20) for index in range(50)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert len(np.unique(numbers)) == len(numbers)
    np.testing.assert_allclose(np.histogram(numbers, 4, (0, 1))[0] / len(numbers), 0.25, atol=0.04)


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest_id():
    assert sample([1.0, 3.0, 3.0, 2.0], temperature=0.0) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 5e-324])
def test_tiny_temperatures_are_greedy_and_never_nan(temperature):
    """Field case BR-018."""
    for seed in range(50):
        assert sample([-5e4, 7e4, 7e4 - 10, 0.0], temperature=temperature, seed=seed) == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 10**9}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),  # exactly three, the tie is decided by id
        ({"top_p": 0.0}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),  # met exactly: ends there
        ({"top_p": 0.61}, {0, 1, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {0, 1, 2, 3}),
        ({"min_p": 0.51}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.66}, {0}),  # top_p counts what top_k left: 2/3 and 1/3
        ({"top_k": 2, "top_p": 0.67}, {0, 1}),
        ({"temperature": 0.5, "top_p": 0.58}, {0, 1}),  # 4/7, 1/7, 1/7, 1/7
        ({"temperature": 0.5, "top_p": 0.57}, {0}),
    ],
)
def test_filters_keep_what_they_say(params, expected):
    """Probabilities 0.4, 0.2, 0.2, 0.2 at temperature 1 (field case BR-020: off means off, one always survives)."""
    assert survivors(np.log([2.0, 1.0, 1.0, 1.0]), **params) == expected


def test_off_filters_do_not_change_a_seeded_draw():
    logits = np.random.default_rng(0).normal(0, 2, 50)
    for seed in range(30):
        plain = sample(logits, seed=seed)
        assert sample(logits, seed=seed, top_k=0) == sample(logits, seed=seed, top_k=-1) == plain
        assert sample(logits, seed=seed, top_p=1.0, min_p=0.0, top_k=10**9) == plain


def test_draws_follow_the_probabilities():
    counts = np.bincount([sample(np.log([2.0, 1.0, 1.0]), seed=seed) for seed in range(3000)], minlength=3)
    np.testing.assert_allclose(counts / 3000, [0.5, 0.25, 0.25], atol=0.03)


def test_a_stream_depends_on_seed_and_index_only():
    """Field case BR-024, and resumption after preemption: the i-th output token is draw number i."""
    logits = np.zeros(64, np.float32)
    whole = sampler(64, seed=42)
    stream = [whole.sample(logits) for _ in range(10)]
    assert len(set(stream)) > 5
    resumed = sampler(64, seed=42, output=stream[:4])
    assert [resumed.sample(logits) for _ in range(6)] == stream[4:]
    other = sampler(64, seed=43)
    assert [other.sample(logits) for _ in range(10)] != stream


def test_presence_and_frequency_count_generated_tokens_only():
    """Field case BR-021."""
    logits = np.array([5.0, 3.5, 0.0, 0.0], np.float32)
    penalised = sampler(prompt=[0] * 10, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    # 5, 3.5 → 5 - 4 = 1, 3.5 → 1, 3.5 - 4 = -0.5 → 5 - 6 = -1, -0.5, 0, 0
    assert [penalised.sample(logits) for _ in range(4)] == [0, 1, 0, 2]


def test_repetition_counts_the_prompt_and_shrinks_towards_and_past_zero():
    assert sample([4.0, 3.0, -1.0, -9.0], temperature=0.0, repetition_penalty=2.0, prompt=[0]) == 1
    assert sample([-4.0, -5.0, -9.0, -9.0], temperature=0.0, repetition_penalty=2.0, prompt=[0]) == 1
    assert sample([4.0, 3.0, 0.0, 0.0], temperature=0.0, repetition_penalty=2.0, output=[0, 0, 0]) == 1


def test_logit_bias_removes_or_forces_and_ignores_unknown_ids():
    """Field case BR-022."""
    assert sample([5.0, 1.0, 0.0, 0.0], temperature=0.0, logit_bias=((0, -100.0),)) == 1
    assert survivors([5.0, 1.0, 0.0, 0.0], logit_bias=((2, 100.0),)) == {2}
    assert sample([5.0, 1.0, 0.0, 0.0], temperature=0.0, logit_bias=((99999999, 5.0),)) == 0


def test_suppressed_ids_return_after_enough_tokens():
    logits = np.array([5.0, 1.0, 0.0, 0.0], np.float32)
    waiting = sampler(temperature=0.0, suppress=[0, 7], suppress_until=3, output=[2])
    assert [waiting.sample(logits) for _ in range(4)] == [1, 1, 0, 0]


def test_masked_and_padding_ids_are_never_drawn():
    """Field case BR-025."""
    mask = np.array([0b1010], np.uint32)
    logits = np.array([9.0, 1.0, 0.0, 1.0, 50.0], np.float32)
    drawn = {
        Sampler(5, 4, SamplingParams(seed=seed, temperature=2.0), (), ()).sample(logits, mask)
        for seed in range(100)
    }
    assert drawn == {1, 3}
    assert sample([1.0, 2.0, 9.0], temperature=0.0, valid=2) == 1


def test_nothing_left_to_sample_is_minus_one_and_is_not_recorded():
    empty = sampler(temperature=0.0, presence_penalty=1.0)
    assert empty.sample(np.zeros(4, np.float32), np.array([0], np.uint32)) == -1
    assert empty.sample(np.full(4, np.nan, np.float32)) == -1
    assert empty.sample(np.zeros(4, np.float32)) == 0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_nan_is_removed_and_infinity_is_the_largest(params):
    assert sample([np.nan, 1.0, INF, -INF], **params) == 2
    assert survivors([np.nan, 1.0, np.nan, -INF], **params) == {1}


def test_logprobs_are_finite_sums_to_one_and_know_padding():
    logits = np.array([1e30, 3.0, -INF, np.nan, 2.0], np.float32)
    logprobs = log_softmax(logits)
    assert logprobs[0] == 0.0
    assert not np.isnan(logprobs).any()
    plain = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert np.exp(log_softmax(plain).astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-6)
    assert top_alternatives(plain, 3, 4).tolist() == [1, 3, 2]
    assert top_alternatives(plain, 3, 3).tolist() == [1, 2, 0]
    assert top_alternatives(logits, 5, 5).tolist() == [0, 1, 4]


def test_samplers_do_not_touch_the_logits_they_are_given():
    logits = np.array([5.0, 1.0, np.nan, 0.0], np.float32)
    before = logits.copy()
    sampler(logit_bias=((0, -100.0),), repetition_penalty=2.0, prompt=[1]).sample(logits)
    np.testing.assert_array_equal(logits, before)
