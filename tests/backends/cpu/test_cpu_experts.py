"""Mixtures of experts and pooling on the cpu backend against the reference, at awkward sizes."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, random_weights
from fixtures.encoders import tiny_bert, write_folder
from fixtures.graphs import CONFIG, RandomRecorder
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.errors import EngineError, UnsupportedModelError
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.graph.shapes import weight_shapes
from toque.models import build_graph

ISAS = [isa for isa in _native.isas() if isa != "avx512_emulated"]


def experts(n_experts, n_used, ffn, *, width=64, layers=2, norm=True, act="silu", select=False):
    rec = RandomRecorder()
    x = rec.embed("table", width)
    for layer in range(layers):
        names = {part: f"{layer}.{part}" for part in ("router", "gate", "up", "down")}
        normed = rec.rms_norm(x, f"{layer}.norm", eps=1e-5)
        y = rec.moe(normed, **names, n_experts=n_experts, n_used=n_used, ffn_size=ffn, act=act, norm=norm)
        x = rec.add(x, y)
    return fuse(rec.finish(rec.select_rows(x) if select else x))


def both(graph, isa="", threads=2):
    weights = random_weights(weight_shapes(graph), rows=40)
    options = BackendOptions(threads, isa, max_batch_tokens=64, max_sequences=64)
    return [
        backend.lower(graph, memory_checkpoint(CONFIG, weights), options)
        for backend in (ReferenceBackend(), CpuBackend())
    ]


def one_batch(n, seed=0, rows=None):
    tokens = np.random.default_rng(seed).integers(0, 40, n).tolist()
    return batch_of([(tokens, 0, [0, 1])], rows=rows)


def assert_same(graph, batch, **how):
    executables = both(graph, **how)
    for executable in executables:
        executable.allocate_kv(4)
    expected, actual = (executable.logits(batch) for executable in executables)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * max(np.abs(expected).max(initial=0), 1))


@pytest.mark.parametrize(("n_experts", "n_used"), [(1, 1), (2, 1), (5, 2), (8, 8), (40, 3), (128, 8)])
@pytest.mark.parametrize("ffn", [32, 40, 96])
def test_experts_agree_with_the_reference(n_experts, n_used, ffn):
    assert_same(experts(n_experts, n_used, ffn), one_batch(29))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_few_tokens_take_their_own_way(tokens):
    assert_same(experts(6, 2, 40), one_batch(tokens))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_every_kind_of_expert(norm, act):
    assert_same(experts(6, 2, 64, norm=norm, act=act), one_batch(13))


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    assert_same(experts(6, 2, 64), one_batch(13), isa=isa)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads(threads):
    assert_same(experts(6, 2, 64), one_batch(13), threads=threads)


@pytest.mark.parametrize("rows", [[], [4], [0, 7, 12]])
def test_only_wanted_rows_go_through_the_last_experts(rows):
    graph = experts(6, 2, 64, select=True)
    assert next(node.op for node in graph.nodes) == "embed"
    assert [node.op for node in graph.nodes].index("select_rows") == 1
    assert_same(graph, one_batch(13, rows=rows))


def test_a_token_gives_the_same_bits_in_any_company():
    _, cpu = both(experts(6, 2, 64))
    cpu.allocate_kv(4)
    together = cpu.logits(one_batch(29))
    tokens = one_batch(29).tokens.tolist()
    for i in (0, 11, 28):
        np.testing.assert_array_equal(cpu.logits(batch_of([(tokens[i : i + 1], 0, [0])]))[0], together[i])


def test_experts_of_two_shapes_in_one_model():
    rec = RandomRecorder()
    x = rec.embed("table", 64)
    for layer, (n_experts, ffn) in enumerate([(4, 32), (4, 64), (6, 32), (4, 32)]):
        names = {part: f"{layer}.{part}" for part in ("router", "gate", "up", "down")}
        x = rec.add(x, rec.moe(x, **names, n_experts=n_experts, n_used=2, ffn_size=ffn, act="silu"))
    assert_same(fuse(rec.finish(x)), one_batch(29))


def test_an_expert_type_without_a_packed_form_is_named(tmp_path):
    graph = experts(2, 1, 32, layers=1)
    checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), rows=40))
    object.__setattr__(checkpoint.tensors["0.up"], "dtype", "I8")
    with pytest.raises(UnsupportedModelError, match=r"0\.up\[0\] \(I8\)"):
        CpuBackend().lower(graph, checkpoint, BackendOptions(threads=1))


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_pooling_agrees_with_the_reference(kind):
    rec = RandomRecorder()
    graph = rec.finish(rec.pool(rec.embed("table", 50), kind=kind))
    three = [([1, 2, 3], 0, [0]), ([4], 0, [1]), (list(range(40)), 0, [2, 3])]
    assert_same(graph, batch_of(three, rows=[2, 3, 43]))


def test_an_encoder_takes_no_position_that_it_has_not_learned(tmp_path):
    checkpoint = load_checkpoint(write_folder(tiny_bert(max_position_embeddings=32), tmp_path))
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    cpu = CpuBackend().lower(
        graph, checkpoint, BackendOptions(threads=1, max_batch_tokens=64, max_sequences=4)
    )
    cpu.allocate_kv(4)
    assert cpu.logits(batch_of([([1] * 32, 0, [0])], rows=[31])).shape == (1, 64)
    with pytest.raises(EngineError, match="context"):
        cpu.logits(batch_of([([1] * 33, 0, [0, 1])], rows=[32]))
    with pytest.raises(EngineError, match="rows"):
        cpu.logits(batch_of([([1] * 3, 0, [0]), ([2], 0, [1])], rows=[2]))
