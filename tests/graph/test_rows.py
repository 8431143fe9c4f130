"""`select_rows` moves up to the last attention, and the wanted rows keep their bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, random_weights
from fixtures.graphs import CONFIG, random_decoder
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.graph.fuse import fuse
from toque.graph.recorder import Recorder
from toque.graph.rows import hoist_rows
from toque.graph.shapes import weight_shapes
from toque.models import build_graph


def ops(graph):
    return [node.op for node in graph.nodes]


def wanted_logits(graph, weights, rows):
    executable = ReferenceBackend().lower(graph, memory_checkpoint(CONFIG, weights), BackendOptions())
    executable.allocate_kv(4)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 40, 40)]
    first = executable.logits(batch_of([(tokens[:25], 0, [0, 1])], rows=rows))
    return np.concatenate([first, executable.logits(batch_of([(tokens[25:], 25, [0, 1])], rows=[3, 14]))])


@pytest.mark.parametrize("rows", [[0, 7, 24], [24], []])
@pytest.mark.parametrize("seed", range(10))
def test_random_models_give_the_same_bits(seed, rows):
    graph = random_decoder(np.random.default_rng(seed))
    weights = random_weights(weight_shapes(graph))
    for form in (graph, fuse(graph)):
        hoisted = hoist_rows(form)
        assert len({value.id for node in hoisted.nodes for value in node.outputs}) == sum(
            len(node.outputs) for node in hoisted.nodes
        )
        np.testing.assert_array_equal(
            wanted_logits(hoisted, weights, rows), wanted_logits(graph, weights, rows)
        )


def test_the_last_layer_of_llama_runs_for_wanted_rows_only():
    layer = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()
    names = ["token_embd", "output_norm", "output", *(f"blk.0.{name}" for name in layer)]
    config = replace(CONFIG, architecture="llama")
    graph = fuse(build_graph(config, [f"{name}.weight" for name in names]))
    hoisted = hoist_rows(graph)
    assert ops(hoisted) == [
        "embed", "rms_norm", "linear", "rope_attention", "select_rows", "select_rows",
        "linear", "rms_norm", "gated_linear", "linear", "rms_norm", "linear",
    ]  # fmt: skip
    assert ops(hoist_rows(hoisted)) == ops(hoisted)


def test_a_graph_without_anything_to_move_is_returned_as_it_is():
    rec = Recorder(["table"])
    graph = rec.finish(rec.select_rows(rec.embed("table", 8)))
    assert hoist_rows(graph) is graph
