"""The integer codes of the 16-bit KV cache against float attention, with queries, keys and values given as they are."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, prefill_logits
from fixtures.graphs import CONFIG, AnyName
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.graph.recorder import Recorder

ISAS = [isa for isa in _native.isas() if not isa.startswith("avx512")]  # those that have bf16 instead
HEADS = 3


def attending(q, k, v, isa=""):
    """Token i has the query q[i] in three heads, the key k[i] and the value v[i]; logits are the attention's output."""
    dim = k.shape[1]
    rec = Recorder(())
    rec._names = AnyName()
    x = rec.embed("table", 3 * dim)
    parts = [rec.linear(x, name, width) for name, width in (("q", HEADS * dim), ("k", dim), ("v", dim))]
    o = rec.attention(*parts, n_heads=HEADS, n_kv_heads=1, head_dim=dim)
    graph = rec.finish(rec.linear(rec.select_rows(o), "out", HEADS * dim))
    one, none = np.eye(dim), np.zeros((dim, dim))
    weights = {
        "table": np.concatenate([q, k, v], axis=1),
        "q": np.concatenate([np.concatenate([one, none, none], axis=1)] * HEADS),
        "k": np.concatenate([none, one, none], axis=1),
        "v": np.concatenate([none, none, one], axis=1),
        "out": np.eye(HEADS * dim),
    }
    executable = CpuBackend().lower(
        graph, memory_checkpoint(CONFIG, weights), BackendOptions(2, isa or ISAS[0], 600, 600)
    )
    executable.allocate_kv(40)
    return executable


def outputs(q, k, v, isa="", chunk=0):
    rows = prefill_logits(attending(q, k, v, isa), range(len(k)), chunk=chunk)
    first, *others = np.split(rows, HEADS, axis=1)
    for other in others:
        np.testing.assert_array_equal(other, first)
    return first


def expected(q, k, v):
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    scores = q @ k.T / np.sqrt(k.shape[1])
    scores[np.triu_indices(len(k), 1)] = -np.inf
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_it_is_closer_than_bf16_and_about_as_close_as_f16(dim):
    q, k, v = (normal(270, dim, seed=i) for i in range(3))
    exact = expected(q, k, v)
    error = np.abs(outputs(q, k, v) - exact).max()
    assert error < 1e-3 * np.abs(v).max()
    assert np.sqrt(np.mean((outputs(q, k, v) - exact) ** 2)) < 2e-4 * np.sqrt(np.mean(v**2))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parallel_vectors_and_equal_values_do_not_overflow_a_sum(dim, sign):
    """The largest sums there are: query and key in one direction, every token of a chunk of the same large value."""
    one = np.ones((260, dim))
    k = one * np.linspace(4.0, 4.5, 260)[:, None] * sign
    v = one * 1000.0 * sign
    np.testing.assert_allclose(outputs(one, k, v), v, rtol=2e-4)
    single = np.zeros((260, dim))
    single[:, 5] = 40.0 * sign  # a length of one number
    np.testing.assert_allclose(outputs(single, single, v), v, rtol=2e-4)


def test_a_channel_a_hundred_times_as_loud_leaves_the_others_their_precision():
    q, k, v = (normal(300, 64, seed=i) for i in range(3))
    k[:, 7] += 100.0
    q[:, 7] *= 0.1
    loud = v.copy()
    loud[:, 9] *= 100.0
    error = np.abs(outputs(q, k, loud) - expected(q, k, loud))
    assert error[:, 9].max() < 0.2
    assert np.delete(error, 9, axis=1).max() < 0.03
    assert np.abs(outputs(q, k, v) - expected(q, k, v)).max() < 4e-3


def test_a_token_that_takes_nearly_all_attention_leaves_the_rest_theirs():
    """An attention sink: the first token has nine tenths of every row's probability and a value of nearly zero."""
    q, k, v = normal(256, 64), 0.1 * normal(256, 64, seed=1), normal(256, 64, seed=2)
    q[:, 0], k[:, 0] = 8.0, 0.0
    k[0, 0] = 7.8
    v[0] *= 0.02
    exact = expected(q, k, v)
    last = slice(128, None)
    assert np.abs(outputs(q, k, v) - exact)[last].max() < 0.02 * np.abs(exact[last]).max()


def test_every_instruction_set_with_codes_gives_the_same_bits():
    q, k, v = (normal(290, 80, seed=i) for i in range(3))
    first, *others = (outputs(q, k, v, isa) for isa in ISAS)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("chunk", [1, 5, 64, 257])
def test_cutting_a_prompt_with_outliers_changes_no_bit(chunk):
    q, k, v = (normal(290, 64, seed=i) * np.exp(2 * normal(290, 1, seed=9 + i)) for i in range(3))
    np.testing.assert_array_equal(outputs(q, k, v, chunk=chunk), outputs(q, k, v))


def test_a_hidden_token_of_any_size_changes_no_bit():
    """Rows that share their pass, and their tile of the cache, with later and louder tokens."""
    q, k, v = (normal(40, 64, seed=i) for i in range(3))
    quiet = outputs(q, k, v)
    k[21:] *= 1e6
    v[21:] *= 1e9
    np.testing.assert_array_equal(outputs(q, k, v)[:21], quiet[:21])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e15, 3e38])
def test_numbers_of_any_size_give_finite_ones(scale):
    q, k, v = (np.clip(normal(60, 64, seed=i), -1, 1) * scale for i in range(3))
    out = outputs(q, k, v)
    assert np.isfinite(out).all()
    if scale == 1e-12:  # no score differs from another by anything
        np.testing.assert_allclose(out, expected(q, k, v), atol=1e-15)


def test_keys_of_nothing_but_nan_stay_within_their_sequence():
    q, k, v = (normal(60, 64, seed=i) for i in range(3))
    clean = outputs(q, k, v)
    k[50], v[51] = np.nan, np.inf
    executable = attending(q, k, v)
    both = executable.logits(batch_of([(range(50), 0, [3, 4]), (range(50, 60), 0, [5])]))
    np.testing.assert_array_equal(both[:50, :64], clean[:50])
