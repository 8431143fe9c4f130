"""The recorder refuses what no backend could run, and names it."""

from __future__ import annotations

import pytest

from toque.errors import FormatError, UnsupportedModelError
from toque.graph.ir import KVLayer
from toque.graph.recorder import Recorder
from toque.graph.rope import rope_spec
from toque.graph.shapes import check_shapes, weight_shapes

NAMES = ("table", "gain", "w", "b")


@pytest.fixture
def rec():
    return Recorder(NAMES)


def test_nodes_come_in_the_order_of_the_calls_with_their_widths(rec):
    x = rec.embed("table", 64, scale=2.0)
    normed = rec.rms_norm(x, "gain", eps=1e-6)
    y = rec.linear(normed, "w", 32, bias="b")
    graph = rec.finish(y)
    assert [node.op for node in graph.nodes] == ["embed", "rms_norm", "linear"]
    assert (x.width, normed.width, y.width) == (64, 64, 32)
    assert graph.nodes[2].inputs == (normed,)
    assert graph.nodes[2].attrs["bias"] == ("b",)
    assert graph.output is y


def test_attention_appends_a_kv_layer_and_fills_in_the_scale(rec):
    q, k = rec.embed("table", 64), rec.embed("table", 32)
    rec.attention(q, k, k, n_heads=4, n_kv_heads=2, head_dim=16)
    out = rec.attention(q, k, k, n_heads=4, n_kv_heads=2, head_dim=16, window=8, scale=0.5)
    graph = rec.finish(out)
    assert graph.kv == (KVLayer(2, 16, 0), KVLayer(2, 16, 8))
    first, second = (node.attrs for node in graph.nodes if node.op == "attention")
    assert (first["layer"], second["layer"]) == (0, 1)
    assert (first["scale"], second["scale"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda rec, x, y: rec.add(x, y), "add is 64 wide where 32"),
        (lambda rec, x, y: rec.act_mul(x, y, act="silu"), "act_mul"),
        (lambda rec, x, y: rec.act_mul(x, x, act="relu"), "'relu' is not one of silu"),
        (lambda rec, x, y: rec.rms_norm(x, "gain", eps=0, group=24), "group 24 does not divide the width 64"),
        (lambda rec, x, y: rec.rope(x, head_dim=24, rope=rope_spec(1e4, 8)), "head_dim 24"),
        (lambda rec, x, y: rec.rope(x, head_dim=16, rope=rope_spec(1e4, 32)), "rotates 32 dimensions"),
        (
            lambda rec, x, y: rec.attention(x, y, x, n_heads=4, n_kv_heads=2, head_dim=16),
            "attention v is 64 wide",
        ),
        (
            lambda rec, x, y: rec.attention(x, y, y, n_heads=4, n_kv_heads=3, head_dim=16),
            "multiple of n_kv_heads",
        ),
        (lambda rec, x, y: rec.linear(x, "w", 0), "0 columns"),
        (lambda rec, x, y: rec.softcap(x, cap=-1.0), "softcap must be positive"),
        (lambda rec, x, y: rec.pool(x, kind="max"), "pooling"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(rec, record, message):
    x, y = rec.embed("table", 64), rec.embed("table", 32)
    with pytest.raises(UnsupportedModelError, match=message):
        record(rec, x, y)


def test_a_weight_that_the_checkpoint_lacks_is_named(rec):
    x = rec.embed("table", 64)
    with pytest.raises(FormatError, match="missing"):
        rec.linear(x, "missing", 32)
    with pytest.raises(FormatError, match="no_bias"):
        rec.linear(x, "w", 32, bias="no_bias")


def test_shapes_of_the_file_are_checked_against_the_graph(rec):
    graph = rec.finish(rec.linear(rec.rms_norm(rec.embed("table", 64), "gain", eps=1e-6), "w", 32, bias="b"))
    assert weight_shapes(graph) == {"table": (None, 64), "gain": (64,), "w": (32, 64), "b": (32,)}
    right = {"table": (100, 64), "gain": (64,), "w": (32, 64), "b": (32,)}
    check_shapes(graph, right)
    for name, shape in (("w", (64, 32)), ("gain", (32,)), ("b", (1, 32)), ("table", (100, 65))):
        with pytest.raises(FormatError, match=f"{name}: the model's configuration needs"):
            check_shapes(graph, right | {name: shape})
    with pytest.raises(FormatError, match="b: the checkpoint does not have"):
        check_shapes(graph, {name: shape for name, shape in right.items() if name != "b"})


def test_a_tied_table_must_fit_both_uses():
    rec = Recorder(["table"])
    graph = rec.finish(rec.linear(rec.embed("table", 8), "table", 20))
    assert weight_shapes(graph) == {"table": (20, 8)}
