"""Fusion makes fewer nodes and never another result: recorded and fused graphs run on the reference backend."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.checkpoints import memory_checkpoint, prefill_logits, random_weights
from fixtures.graphs import CONFIG, RandomRecorder, random_decoder
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.graph.fuse import fuse
from toque.graph.rope import rope_spec
from toque.graph.shapes import weight_shapes


def logits(graph, weights, tokens):
    executable = ReferenceBackend().lower(graph, memory_checkpoint(CONFIG, weights), BackendOptions())
    executable.allocate_kv(4)
    return prefill_logits(executable, tokens, chunk=9)


def ops(graph):
    return [node.op for node in graph.nodes]


def assert_same_results(graph):
    fused, weights = fuse(graph), random_weights(weight_shapes(graph))
    assert weight_shapes(fused) == weight_shapes(graph)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 40, 40)]
    np.testing.assert_array_equal(logits(fused, weights, tokens), logits(graph, weights, tokens))
    return fused


@pytest.mark.parametrize("seed", range(30))
def test_random_models_give_the_same_bits_fused(seed):
    graph = random_decoder(np.random.default_rng(seed))
    fused = assert_same_results(graph)
    assert len(fused.nodes) < len(graph.nodes)
    assert ops(fused).index("select_rows") < len(fused.nodes) - 3


def test_qkv_becomes_one_linear_and_rope_moves_into_attention():
    rec = RandomRecorder()
    x = rec.embed("table", 32)
    q, k, v = (rec.linear(x, name, width) for name, width in (("q", 32), ("k", 16), ("v", 16)))
    rope = rope_spec(1e4, 16)
    q, k = (rec.rope(value, head_dim=16, rope=rope) for value in (q, k))
    graph = rec.finish(rec.attention(q, k, v, n_heads=2, n_kv_heads=1, head_dim=16))
    fused = assert_same_results(graph)
    assert ops(fused) == ["embed", "linear", "rope_attention"]
    assert fused.nodes[1].weights == ("q", "k", "v")
    assert [value.width for value in fused.nodes[1].outputs] == [32, 16, 16]
    assert fused.nodes[2].attrs["rope"] is rope
    assert fused.kv == graph.kv


def test_head_norms_move_into_attention_only_as_a_pair():
    for both in (True, False):
        rec = RandomRecorder()
        x = rec.embed("table", 32)
        q, k, v = (rec.linear(x, name, width) for name, width in (("q", 32), ("k", 16), ("v", 16)))
        q = rec.rms_norm(q, "q_norm", eps=1e-6, group=16)
        k = rec.rms_norm(k, "k_norm", eps=1e-6, group=16) if both else k
        rope = rope_spec(1e4, 16)
        q, k = (rec.rope(value, head_dim=16, rope=rope) for value in (q, k))
        fused = assert_same_results(rec.finish(rec.attention(q, k, v, n_heads=2, n_kv_heads=1, head_dim=16)))
        expected = (
            ["embed", "linear", "rope_attention"]
            if both
            else ["embed", "linear", "rms_norm", "rope_attention"]
        )
        assert ops(fused) == expected
        assert fused.nodes[-1].weights == (("q_norm", "k_norm") if both else ())


def test_gate_and_up_become_gated_linear_with_their_biases():
    rec = RandomRecorder()
    x = rec.embed("table", 32)
    gate, up = rec.linear(x, "gate", 48, bias="gate_bias"), rec.linear(x, "up", 48)
    fused = assert_same_results(rec.finish(rec.act_mul(gate, up, act="silu")))
    assert ops(fused) == ["embed", "gated_linear"]
    assert fused.nodes[1].weights == ("gate", "up")
    assert fused.nodes[1].attrs == {"act": "silu", "bias": ("gate_bias", "")}


def test_residual_add_moves_into_the_linear_before_it():
    rec = RandomRecorder()
    x = rec.embed("table", 32)
    y = rec.add(x, rec.linear(x, "w", 32, bias="b"))
    fused = assert_same_results(rec.finish(y))
    assert ops(fused) == ["embed", "linear"]
    assert fused.nodes[1].inputs == (x, x)
    assert fused.nodes[1].attrs == {"bias": ("b",), "residual": True}


def test_add_and_norm_become_one_only_where_the_sum_is_needed_too():
    for needed in (True, False):
        rec = RandomRecorder()
        x = rec.embed("table", 32)
        total = rec.add(x, rec.gelu(x, tanh=True))
        normed = rec.rms_norm(total, "gain", eps=1e-6)
        fused = assert_same_results(rec.finish(rec.add(total, normed) if needed else normed))
        assert ("add_rms_norm" in ops(fused)) == needed


def test_a_value_with_another_reader_is_not_swallowed():
    rec = RandomRecorder()
    x = rec.embed("table", 32)
    gate, up = rec.linear(x, "gate", 32), rec.linear(x, "up", 32)
    out = rec.add(rec.act_mul(gate, up, act="silu"), gate)
    fused = assert_same_results(rec.finish(out))
    assert ops(fused) == ["embed", "linear", "act_mul", "add"]


def test_the_output_itself_is_never_swallowed():
    rec = RandomRecorder()
    x = rec.embed("table", 32)
    y = rec.linear(x, "w", 32)
    rec.add(x, y)
    assert_same_results(rec.finish(y))


def test_fusing_twice_changes_nothing():
    graph = fuse(random_decoder(np.random.default_rng(1)))
    assert ops(fuse(graph)) == ops(graph)
