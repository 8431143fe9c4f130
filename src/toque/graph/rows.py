"""Moves `select_rows` towards the input, so that nothing is computed for rows that nobody wants.

Recorded, the selection stands before the final norm. But after the last attention every op works on each row by
itself, so the last layer's output projection and ffn are needed for the wanted rows only: in a prompt that is one row
of hundreds, or none.

::

    attention ─ linear ─ norm ─ ffn ─ select_rows ─ norm ─ linear
    attention ─ select_rows ─ linear ─ norm ─ ffn ─ norm ─ linear
"""

from __future__ import annotations

from dataclasses import replace

from toque.graph.ir import Graph, Node, Value

# Ops whose every output row depends on the same row of their inputs, and on nothing else.
_BY_ROW = frozenset(
    (
        "linear",
        "gated_linear",
        "rms_norm",
        "layer_norm",
        "add_rms_norm",
        "act_mul",
        "gelu",
        "add",
        "scale",
        "moe",
    )
)


def hoist_rows(graph: Graph) -> Graph:
    """An equal graph in which `select_rows` stands as early as it can, once for each value that crosses."""
    selects = [node for node in graph.nodes if node.op == "select_rows"]
    if len(selects) != 1:
        return graph
    select = selects[0]
    after = _nodes_before_selection_only(graph, select)
    if not after:
        return graph
    selected: dict[int, Value] = {select.outputs[0].id: select.inputs[0]}
    next_id = 1 + max(value.id for node in graph.nodes for value in node.outputs)
    restricted = {value.id for node in graph.nodes if id(node) in after for value in node.outputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node is select:
            continue
        if id(node) in after:
            for value in node.inputs:
                if value.id not in restricted and value.id not in selected:
                    selected[value.id] = Value(next_id, value.width)
                    next_id += 1
                    nodes.append(Node("select_rows", (value,), (selected[value.id],)))
            node = replace(node, inputs=tuple(selected.get(value.id, value) for value in node.inputs))
        elif any(value.id == select.outputs[0].id for value in node.inputs):
            node = replace(
                node,
                inputs=tuple(
                    select.inputs[0] if value == select.outputs[0] else value for value in node.inputs
                ),
            )
        nodes.append(node)
    output = select.inputs[0] if graph.output == select.outputs[0] else graph.output
    return Graph(tuple(nodes), output, graph.kv)


def _nodes_before_selection_only(graph: Graph, select: Node) -> set[int]:
    """``id`` of the row-wise nodes whose outputs reach nothing but ``select``."""
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value.id, []).append(node)
    only: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op not in _BY_ROW or any(value == graph.output for value in node.outputs):
            continue
        read_by = [reader for value in node.outputs for reader in readers.get(value.id, ())]
        if read_by and all(reader is select or id(reader) in only for reader in read_by):
            only.add(id(node))
    return only
