"""The native sampler makes the choices of the numpy one, case for case, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest

from toque._native import Sampler as NativeSampler
from toque._native import isas
from toque.backends.reference.sampler import Sampler, log_softmax, top_alternatives
from toque.types import SamplingParams


@pytest.fixture(params=isas())
def isa(request):
    return request.param


class Twins:
    """The same request opened in both samplers."""

    def __init__(self, isa, vocab, valid, params, prompt=(), output=(), suppress=(), suppress_until=0):
        self.reference = Sampler(vocab, valid, params, prompt, output, suppress, suppress_until)
        self.native = NativeSampler(vocab, valid, 3, isa=isa)
        self.native.open(
            1,
            np.array(prompt, np.int32),
            np.array(output, np.int32),
            greedy=params.greedy,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            logit_bias=list(params.logit_bias),
            suppress=list(suppress),
            suppress_until=suppress_until,
        )

    def sample(self, logits, mask=None):
        """Both choices for one row."""
        return self.native.run(logits.copy(), 1, mask=mask)[0], self.reference.sample(logits, mask)


def random_logits(random, vocab):
    kind = random.integers(0, 5)
    if kind == 0:  # few levels: ties everywhere
        return random.integers(-2, 3, vocab).astype(np.float32)
    if kind == 1:
        return np.zeros(vocab, np.float32)
    logits = random.normal(0.0, float(random.choice([0.3, 2.0, 20.0])), vocab).astype(np.float32)
    if kind == 2:
        logits[random.random(vocab) < 0.3] = random.choice([-np.inf, np.nan, np.inf, 1e30])
    return logits


def random_params(random):
    def one_of(*values):
        return random.choice(values)

    return SamplingParams(
        temperature=float(one_of(0.0, 1e-3, 0.2, 0.7, 1.0, 2.0)),
        top_k=int(one_of(0, 0, -1, 1, 2, 3, 5, 10**9)),
        top_p=float(one_of(1.0, 1.0, 0.0, 1e-9, 0.3, 0.5, 0.9, 0.999999)),
        min_p=float(one_of(0.0, 0.0, 0.05, 0.5, 1.0)),
        repetition_penalty=float(one_of(1.0, 1.0, 1.3, 0.5)),
        presence_penalty=float(one_of(0.0, 0.0, 2.0, -0.7)),
        frequency_penalty=float(one_of(0.0, 0.0, 2.0, 0.1)),
        logit_bias=tuple(
            (int(token), float(one_of(-100.0, 5.0))) for token in random.integers(0, 12, one_of(0, 2))
        ),
        seed=int(random.integers(-(2**63), 2**63)),
    )


def random_ids(random, vocab, count):
    return [int(token) for token in random.integers(-1, vocab + 2, count)]


@pytest.mark.parametrize("seed", range(8))
def test_choices_equal_the_numpy_sampler_on_tiny_vocabularies_with_ties(isa, seed):
    random = np.random.default_rng(seed)
    for case in range(400):
        vocab = int(random.choice([1, 2, 3, 7, 33, 63, 64, 65, 130, 257]))
        valid = int(random.integers(1, vocab + 1))
        params = random_params(random)
        prompt, output = (random_ids(random, vocab, int(random.integers(0, 6))) for _ in range(2))
        suppress, until = random_ids(random, vocab, 2), int(random.integers(0, 8))
        twins = Twins(isa, vocab, valid, params, prompt, output, suppress, until)
        for step in range(3):
            logits = random_logits(random, vocab)
            mask = None
            if random.random() < 0.3:
                mask = random.integers(0, 2**32, (vocab + 31) // 32, dtype=np.uint32)
            native, reference = twins.sample(logits, mask)
            assert native == reference, f"case {case}, step {step}: {params}"
            if native < 0:
                break


@pytest.mark.parametrize("params", [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=50),
    SamplingParams(seed=4, top_k=5000, top_p=0.99),
    SamplingParams(seed=5, min_p=0.05, temperature=1.5),
    SamplingParams(seed=6, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    SamplingParams(seed=7, temperature=2.0, top_p=0.9999),
    SamplingParams(seed=8, temperature=0.0, frequency_penalty=0.5),
], ids=lambda params: f"case{params.seed}")  # fmt: skip
@pytest.mark.parametrize("spread", [0.01, 2.5])
def test_choices_equal_the_numpy_sampler_on_a_real_vocabulary(params, spread):
    random = np.random.default_rng(0)
    vocab = 49152
    twins = Twins("", vocab, vocab, params, prompt=range(100), output=())
    for _ in range(12):
        logits = random.normal(0.0, spread, vocab).astype(np.float32)
        native, reference = twins.sample(logits)
        assert native == reference


def test_reported_logprobs_are_those_of_the_raw_logits(isa):
    random = np.random.default_rng(3)
    for _ in range(200):
        vocab = int(random.integers(1, 200))
        valid = int(random.integers(1, vocab + 1))
        logits = random_logits(random, vocab)
        params = random_params(random)
        twins = Twins(isa, vocab, valid, params, prompt=[0, 1], output=[0])
        top = int(random.integers(0, 21))
        token, logprob, ids, values = twins.native.run(logits.copy(), 1, top=top)
        expected = log_softmax(logits)
        alternatives = list(top_alternatives(logits, top, valid))
        assert ids == alternatives + [-1] * (top - len(alternatives))
        assert token == twins.reference.sample(logits)
        tolerance = {"rtol": 1e-5, "atol": 2e-5}
        if token >= 0:
            np.testing.assert_allclose(logprob, expected[token], **tolerance)
        np.testing.assert_allclose(values[: len(alternatives)], expected[alternatives], **tolerance)
        assert not np.isnan(values).any()


def test_target_reports_without_sampling_or_counting():
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=2.0)
    twins = Twins("", 8, 8, params)
    logits = np.array([0, 1, 3, 2.5, 0, 0, 0, 0], np.float32)
    token, logprob, ids, _ = twins.native.run(logits.copy(), 1, target=3, top=2)
    assert (token, ids) == (3, [2, 3])
    assert logprob == pytest.approx(float(log_softmax(logits)[3]), abs=1e-6)
    assert [twins.native.run(logits.copy(), 1)[0] for _ in range(3)] == [2, 3, 1]


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)
    counts = np.zeros(4)
    for seed in range(40):
        twins = Twins("", 4, 4, SamplingParams(seed=seed))
        for _ in range(100):
            counts[twins.native.run(logits.copy(), 1)[0]] += 1
    np.testing.assert_allclose(counts / counts.sum(), probabilities, atol=0.03)


def test_closed_and_unknown_slots_are_refused():
    sampler = NativeSampler(8, 8, 2)
    with pytest.raises(IndexError, match="slot 0 is not open"):
        sampler.run(np.zeros(8, np.float32), 0)
    with pytest.raises(IndexError, match=r"0\.\.1, got 2"):
        sampler.close(2)
