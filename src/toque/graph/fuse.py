"""The fusion pass: a pure function from a recorded graph to one with fewer, larger ops and the same results.

::

    act_mul(linear(x), linear(x))                         →  gated_linear(x)
    linear(x), linear(x), linear(x)                       →  one linear with three outputs
    attention(rope([rms_norm]q), rope([rms_norm]k), v)    →  rope_attention(q, k, v)
    add(a, linear(x))                                     →  linear(x, a) with ``residual``
    add(a, b) → s;  rms_norm(s)                           →  add_rms_norm, where s is needed elsewhere too

Each rule applies only where the values in between have no other reader. A merged node stands where the last of its
inputs is ready and before its first reader, so the list stays in execution order. At the end `select_rows` moves up
as far as it can (`toque.graph.rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

from toque.graph.ir import Graph, Node, RopeSpec, Value
from toque.graph.rows import hoist_rows

Rule = Callable[["_Uses"], tuple[Node, ...]]


def fuse(graph: Graph) -> Graph:
    nodes = graph.nodes
    for rule in (_gated_linear, _shared_input, _rope_attention, _residual, _add_rms_norm):
        nodes = rule(_Uses(nodes, graph.output))
    return hoist_rows(Graph(nodes, graph.output, graph.kv))


class _Uses:
    """The nodes, and of each value its producer and the number of its readers. Being the output counts as one."""

    def __init__(self, nodes: tuple[Node, ...], output: Value) -> None:
        self.nodes = nodes
        self.producer = {value.id: node for node in nodes for value in node.outputs}
        self.readers = Counter(value.id for node in nodes for value in node.inputs)
        self.readers[output.id] += 1

    def only(self, value: Value, op: str) -> Node | None:
        """The producer of ``value`` if it is a single-output ``op`` and exactly one node reads the value."""
        node = self.producer.get(value.id)
        if node is None or node.op != op or len(node.outputs) != 1 or self.readers[value.id] != 1:
            return None
        return node


def _rewrite(nodes: Iterable[Node], replaced: dict[int, Node], dropped: set[int]) -> tuple[Node, ...]:
    """``nodes`` without those in ``dropped`` and with those in ``replaced`` exchanged; keys are ``id(node)``."""
    return tuple(replaced.get(id(node), node) for node in nodes if id(node) not in dropped)


def _gated_linear(uses: _Uses) -> tuple[Node, ...]:
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for node in uses.nodes:
        if node.op != "act_mul":
            continue
        gate, up = (uses.only(value, "linear") for value in node.inputs)
        if gate is None or up is None or gate.inputs != up.inputs:
            continue
        attrs = {"act": node.attrs["act"], "bias": (*_bias(gate), *_bias(up))}
        replaced[id(node)] = Node("gated_linear", gate.inputs, node.outputs, gate.weights + up.weights, attrs)
        dropped |= {id(gate), id(up)}
    return _rewrite(uses.nodes, replaced, dropped)


def _shared_input(uses: _Uses) -> tuple[Node, ...]:
    groups: dict[int, list[Node]] = {}
    for node in uses.nodes:
        if node.op == "linear" and len(node.inputs) == 1:
            groups.setdefault(node.inputs[0].id, []).append(node)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for group in groups.values():
        if len(group) < 2:
            continue
        first, *rest = (
            group  # the input is ready where the first stands, and nobody reads an output before it
        )
        replaced[id(first)] = Node(
            "linear",
            first.inputs,
            tuple(value for node in group for value in node.outputs),
            tuple(name for node in group for name in node.weights),
            {"bias": tuple(name for node in group for name in _bias(node))},
        )
        dropped |= {id(node) for node in rest}
    return _rewrite(uses.nodes, replaced, dropped)


def _rope_attention(uses: _Uses) -> tuple[Node, ...]:
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for node in uses.nodes:
        if node.op != "attention":
            continue
        q, k, v = node.inputs
        rope_q, rope_k = uses.only(q, "rope"), uses.only(k, "rope")
        if rope_q is None or rope_k is None or not _same_rope(rope_q, rope_k):
            continue
        head_dim = node.attrs["head_dim"]
        if rope_q.attrs["head_dim"] != head_dim or rope_k.attrs["head_dim"] != head_dim:
            continue
        attrs = {**node.attrs, "rope": rope_q.attrs["rope"]}
        inputs = (rope_q.inputs[0], rope_k.inputs[0], v)
        weights: tuple[str, ...] = ()
        dropped |= {id(rope_q), id(rope_k)}
        norm_q, norm_k = (uses.only(rope.inputs[0], "rms_norm") for rope in (rope_q, rope_k))
        if norm_q is not None and norm_k is not None and _head_norms(norm_q, norm_k, head_dim):
            inputs, weights = (norm_q.inputs[0], norm_k.inputs[0], v), norm_q.weights + norm_k.weights
            attrs["norm_eps"] = norm_q.attrs["eps"]
            dropped |= {id(norm_q), id(norm_k)}
        replaced[id(node)] = Node("rope_attention", inputs, node.outputs, weights, attrs)
    return _rewrite(uses.nodes, replaced, dropped)


def _residual(uses: _Uses) -> tuple[Node, ...]:
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for node in uses.nodes:
        if node.op != "add":
            continue
        a, b = node.inputs
        # The second operand is the branch by habit; where both are fresh products one of them stays a plain
        # linear.
        for kept, product in ((a, b), (b, a)):
            linear = uses.only(product, "linear")
            if linear is None or len(linear.inputs) != 1:
                continue
            attrs = {**linear.attrs, "residual": True}
            replaced[id(node)] = Node("linear", (linear.inputs[0], kept), node.outputs, linear.weights, attrs)
            dropped.add(id(linear))
            break
    return _rewrite(uses.nodes, replaced, dropped)


def _add_rms_norm(uses: _Uses) -> tuple[Node, ...]:
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for node in uses.nodes:
        if node.op != "rms_norm" or node.attrs["group"]:
            continue
        total = node.inputs[0]
        add = uses.producer.get(total.id)
        if add is None or add.op != "add" or uses.readers[total.id] < 2 or id(add) in replaced:
            continue
        attrs = {"eps": node.attrs["eps"]}
        replaced[id(add)] = Node("add_rms_norm", add.inputs, (total, node.outputs[0]), node.weights, attrs)
        dropped.add(id(node))
    return _rewrite(uses.nodes, replaced, dropped)


def _bias(linear: Node) -> tuple[str, ...]:
    return cast("tuple[str, ...]", linear.attrs["bias"])


def _same_rope(a: Node, b: Node) -> bool:
    rope_a: RopeSpec = a.attrs["rope"]
    rope_b: RopeSpec = b.attrs["rope"]
    if rope_a is rope_b:
        return True
    return rope_a.mscale == rope_b.mscale and bool(
        rope_a.inv_freq.shape == rope_b.inv_freq.shape and (rope_a.inv_freq == rope_b.inv_freq).all()
    )


def _head_norms(q: Node, k: Node, head_dim: int) -> bool:
    return bool(q.attrs["group"] == k.attrs["group"] == head_dim and q.attrs["eps"] == k.attrs["eps"])
