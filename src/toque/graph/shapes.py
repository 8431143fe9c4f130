"""The shape that each weight of a graph must have, and the check of a checkpoint against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toque.errors import FormatError
from toque.graph.ir import Graph, Node

Shape = tuple[int | None, ...]  # None: any size (an embedding table may have more rows than the output)


def weight_shapes(graph: Graph) -> dict[str, Shape]:
    """``{weight name: (rows, columns), (n,) or (experts, rows, columns)}`` of every weight that the graph reads."""
    shapes: dict[str, Shape] = {}
    for node in graph.nodes:
        for name, shape in _node_shapes(node):
            known = shapes.get(name, shape)
            if len(known) != len(shape):
                raise FormatError(f"used both as {known} and as {shape}", field=name)
            shapes[name] = tuple(a if b is None else b for a, b in zip(known, shape, strict=True))
    return shapes


def check_shapes(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `FormatError` naming the first tensor that is absent or does not have the shape the graph needs."""
    for name, expected in weight_shapes(graph).items():
        actual = shapes.get(name)
        if actual is None:
            raise FormatError("the checkpoint does not have this tensor", field=name)
        fits = len(actual) == len(expected) and all(
            want in (None, have) for want, have in zip(expected, actual, strict=True)
        )
        if not fits:
            wanted = "x".join("?" if size is None else str(size) for size in expected)
            given = "x".join(map(str, actual)) or "a scalar"
            raise FormatError(f"the model's configuration needs {wanted}, the file has {given}", field=name)


def _node_shapes(node: Node) -> Iterator[tuple[str, Shape]]:
    op, weights = node.op, node.weights
    if op == "embed":
        yield weights[0], (None, node.outputs[0].width)
    elif op in ("rms_norm", "layer_norm", "add_rms_norm"):
        width = node.attrs.get("group", 0) or node.outputs[0].width
        for name in weights:
            yield name, (width,)
    elif op in ("linear", "gated_linear"):
        widths = [value.width for value in node.outputs] * (2 if op == "gated_linear" else 1)
        biases = node.attrs["bias"]
        for name, bias, width in zip(weights, biases, widths, strict=True):
            yield name, (width, node.inputs[0].width)
            if bias:
                yield bias, (width,)
    elif op == "rope_attention":
        for name in weights:
            yield name, (node.attrs["head_dim"],)
    elif op == "moe":
        experts, ffn, width = node.attrs["n_experts"], node.attrs["ffn_size"], node.inputs[0].width
        router, gate, up, down = weights
        yield router, (experts, width)
        yield gate, (experts, ffn, width)
        yield up, (experts, ffn, width)
        yield down, (experts, width, ffn)
