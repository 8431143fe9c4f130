"""Lowers a graph, fused or not, to a native model: one native op per node, each bound to its buffers.

The producer of a value writes it in the form its readers want: a norm or an attention whose only readers are linears
writes packed activations and no floats at all. Where that does not work out (a reader that wants floats, two kinds of
activations, heads that are not whole quantization groups), floats are written and packed by an op of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu.buffers import LINEAR_OPS, BufferPool, Place, Uses
from toque.backends.cpu.weights import PackedWeights, Reader
from toque.errors import UnsupportedModelError
from toque.graph.ir import Graph, Node, RopeSpec, Value

GROUP = 32  # values per scale of packed activations
TILE = 16  # a head must be whole vectors

Sink = tuple[_native.Rows | None, _native.ActBuffer | None]


def matrices(graph: Graph) -> list[str]:
    """The weights that are packed, in order of first use."""
    packed = LINEAR_OPS | {"embed", "moe"}
    return [name for node in graph.nodes if node.op in packed for name in node.weights]


class Lowering:
    """One pass over the nodes in order. Raises `UnsupportedModelError` for an op or a shape without a kernel."""

    def __init__(
        self, graph: Graph, weights: PackedWeights, model: _native.Model, options: BackendOptions
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._model = model
        self._options = options
        self._uses = Uses(graph)
        self._pool = BufferPool(model)
        self._places: dict[int, Place] = {}
        self._ropes: dict[int, _native.RopeTable] = {}
        self._readers: dict[int, list[Reader]] = {}
        for node in graph.nodes:
            if node.op in LINEAR_OPS:
                readers = self._readers.setdefault(node.inputs[0].id, [])
                readers += [weights.reader(name) for name in node.weights]
            elif node.op == "moe":  # its router is a linear; the experts gather rows themselves
                self._readers.setdefault(node.inputs[0].id, []).append(weights.reader(node.weights[0]))

    def run(self) -> None:
        for kv in self._graph.kv:
            if kv.head_dim % TILE:
                raise UnsupportedModelError(
                    f"head_dim must be a multiple of {TILE} on the cpu backend, got {kv.head_dim}",
                    param="head_dim",
                )
            self._model.add_kv_layer(kv.n_kv_heads, kv.head_dim, int8=self._options.kv_dtype == "int8")
        for index, node in enumerate(self._graph.nodes):
            lower = _OPS.get(node.op)
            if lower is None:
                raise UnsupportedModelError(
                    f"the cpu backend has no op {node.op!r}; it has {', '.join(_OPS)}", param=node.op
                )
            lower(self, index, node)
            for value in {*node.inputs, *node.outputs}:
                if self._uses.last(value) <= index and value.id in self._places:
                    self._pool.release(self._places[value.id])
            if node.op not in _MAY_SKIP_BARRIER:
                self._pool.barrier()
        self._finish()

    def _finish(self) -> None:
        output = self._graph.output
        place = self._places[output.id]
        rows = self._pool.rows(place, output.width)
        if not place.per_row:
            wanted = self._pool.rows(Place(per_row=True), output.width)
            self._model.select_rows(rows, wanted)
            rows = wanted
        self._model.finish(rows, self._options.valid_vocab, self._options.max_sequences)

    # Places

    def _place(self, value: Value, *inputs: Value, per_row: bool = False) -> Place:
        """A new place for a node's output, with rows like its inputs'."""
        place = Place(per_row or any(self._places[x.id].per_row for x in inputs))
        self._places[value.id] = place
        return place

    def _rows(self, value: Value) -> _native.Rows:
        rows = self._places[value.id].rows
        assert rows is not None, "a value that is read as rows is written as rows"
        return rows

    def _sink(self, value: Value, *, whole_groups: bool = True, private: bool = False) -> Sink:
        """Where the producer of ``value`` writes. Call `_pack` with the same value after the op is added."""
        place = self._places[value.id]
        readers = self._readers.get(value.id, [])
        sorts = {self._pool.sort(reader) for reader in readers}
        direct = whole_groups and len(sorts) == 1 and readers[0].order is None
        floats = self._uses.as_rows(value) or not direct
        act = self._pool.act(place, readers[0], per_worker=private and not floats) if direct else None
        return (self._pool.rows(place, value.width) if floats else None), act

    def _pack(self, value: Value) -> None:
        """Packs the rows of ``value`` for readers whose sort of activations its producer did not write."""
        place = self._places[value.id]
        for reader in self._readers.get(value.id, []):
            if self._pool.sort(reader) not in place.acts:
                rows, act = self._pool.rows(place, value.width), self._pool.act(place, reader)
                if reader.order is None:
                    self._model.pack(rows, act)
                else:
                    self._model.pack_gathered(rows, act, reader.order)

    def _act(self, value: Value, reader: Reader) -> _native.ActBuffer:
        return self._places[value.id].acts[self._pool.sort(reader)]

    def _rope(self, spec: RopeSpec) -> _native.RopeTable:
        if id(spec) not in self._ropes:
            self._ropes[id(spec)] = _native.RopeTable(spec.inv_freq, spec.mscale)
        return self._ropes[id(spec)]

    def _bias(self, name: str) -> Any:
        return self._weights.vector(name) if name else None

    # Ops, in the order of the tables in graph/ir.py

    def _to_rows(self, node: Node, add_op: Callable[[_native.Rows], None], *, per_row: bool = False) -> None:
        """An op that only writes rows."""
        output = node.outputs[0]
        add_op(self._pool.rows(self._place(output, *node.inputs, per_row=per_row), output.width))
        self._pack(output)

    def _to_sink(self, node: Node, add_op: Callable[..., None], *, private: bool = False) -> None:
        """An op that writes rows, packed activations, or both."""
        output = node.outputs[-1]
        self._place(output, *node.inputs)
        add_op(*self._sink(output, private=private))
        self._pack(output)

    def embed(self, _: int, node: Node) -> None:
        table, ids = self._weights.matrix(node.weights[0]), node.attrs["ids"]
        self._to_rows(node, lambda out: self._model.embed(table, ids, node.attrs["scale"], out))

    def rms_norm(self, _: int, node: Node) -> None:
        x, gain = self._rows(node.inputs[0]), self._weights.vector(node.weights[0])
        eps, group = node.attrs["eps"], node.attrs.get("group", 0)
        self._to_sink(node, lambda *out: self._model.rms_norm(x, gain, eps, group, *out), private=True)

    def layer_norm(self, _: int, node: Node) -> None:
        x = self._rows(node.inputs[0])
        gain, bias = (self._weights.vector(name) for name in node.weights)
        eps = node.attrs["eps"]
        self._to_sink(node, lambda *out: self._model.layer_norm(x, gain, bias, eps, *out), private=True)

    def add_rms_norm(self, _: int, node: Node) -> None:
        a, b = (self._rows(value) for value in node.inputs)
        total = node.outputs[0]
        rows = self._pool.rows(self._place(total, *node.inputs), total.width)
        gain, eps = self._weights.vector(node.weights[0]), node.attrs["eps"]
        self._to_sink(node, lambda *out: self._model.add_rms_norm(a, b, gain, eps, rows, *out))
        self._pack(total)

    def linear(self, index: int, node: Node) -> None:
        x, names, biases = node.inputs[0], node.weights, node.attrs["bias"]
        if node.attrs.get("residual"):
            self._residual_linear(index, node)
            return
        label = _label(names)
        by_sort: dict[tuple[int, int], list[tuple[Reader, Any, _native.Rows]]] = {}
        for name, bias, output in zip(names, biases, node.outputs, strict=True):
            reader = self._weights.reader(name)
            out = self._pool.rows(self._place(output, x), output.width)
            by_sort.setdefault(self._pool.sort(reader), []).append((reader, self._bias(bias), out))
        for parts in by_sort.values():
            readers, vectors, outs = (list(column) for column in zip(*parts, strict=True))
            matrices = [reader.matrix for reader in readers]
            self._model.shared_linear(label, self._act(x, readers[0]), matrices, vectors, outs)
        for output in node.outputs:
            self._pack(output)

    def _residual_linear(self, index: int, node: Node) -> None:
        """Adds into the residual's own buffer where nobody reads the old residual any more."""
        (x, residual), (output,), (name,) = node.inputs, node.outputs, node.weights
        (bias,) = node.attrs["bias"]
        reader, old = self._weights.reader(name), self._places[residual.id]
        place = self._place(output, x)
        in_place = self._uses.last(residual) <= index
        if in_place:
            place.rows, place.give_back = old.rows, old.give_back
            old.give_back = []
        out = self._pool.rows(place, output.width)
        self._model.linear(
            _label(node.weights), self._act(x, reader), reader.matrix, self._bias(bias), out, in_place
        )
        if not in_place:
            self._model.add(self._rows(residual), out, out)
        self._pack(output)

    def gated_linear(self, _: int, node: Node) -> None:
        x, output = node.inputs[0], node.outputs[0]
        gate, up = (self._weights.reader(name) for name in node.weights)
        gate_bias, up_bias = (self._bias(name) for name in node.attrs["bias"])
        act, label = node.attrs["act"], _label(node.weights)
        self._place(output, x)
        if self._pool.sort(gate) == self._pool.sort(up):
            rows, packed = self._sink(output, whole_groups=output.width % GROUP == 0)
            if rows is not None and packed is not None:  # the kernel writes one of them
                self._places[output.id].acts.clear()
                packed = None
            x_act = self._act(x, gate)
            self._model.gated_linear(
                label, x_act, gate.matrix, up.matrix, gate_bias, up_bias, act, rows, packed
            )
        else:
            both = [Place(self._places[output.id].per_row) for _ in range(2)]
            gated, plain = (self._pool.rows(place, output.width) for place in both)
            for reader, bias, rows in zip((gate, up), (gate_bias, up_bias), (gated, plain), strict=True):
                self._model.linear(label, self._act(x, reader), reader.matrix, bias, rows, False)
            self._model.act_mul(act, gated, plain, *self._sink(output))
            for place in both:
                self._pool.release(place)
        self._pack(output)

    def rope(self, _: int, node: Node) -> None:
        x, rope, head_dim = self._rows(node.inputs[0]), self._rope(node.attrs["rope"]), node.attrs["head_dim"]
        self._to_rows(node, lambda out: self._model.rotate(x, head_dim, rope, out))

    def attention(self, _: int, node: Node) -> None:
        attrs, output = node.attrs, node.outputs[0]
        q, k, v = (self._rows(value) for value in node.inputs)
        norms: list[Any] = [self._weights.vector(name) for name in node.weights] or [None, None]
        rope = attrs.get("rope")
        self._place(output, *node.inputs)
        rows, act = self._sink(output, whole_groups=attrs["head_dim"] % GROUP == 0)
        self._model.attention(
            q,
            k,
            v,
            layer=attrs["layer"],
            heads=attrs["n_heads"],
            scale=attrs["scale"],
            window=attrs["window"],
            softcap=attrs["softcap"],
            causal=attrs["causal"],
            rope=None if rope is None else self._rope(rope),
            q_norm=norms[0],
            k_norm=norms[1],
            norm_eps=attrs.get("norm_eps", 0.0),
            rows=rows,
            act=act,
        )
        self._pack(output)

    def act_mul(self, _: int, node: Node) -> None:
        gate, up = (self._rows(value) for value in node.inputs)
        self._to_sink(node, lambda *out: self._model.act_mul(node.attrs["act"], gate, up, *out))

    def gelu(self, _: int, node: Node) -> None:
        x, act = self._rows(node.inputs[0]), "gelu_tanh" if node.attrs["tanh"] else "gelu"
        self._to_sink(node, lambda *out: self._model.activate(act, x, *out))

    def add(self, _: int, node: Node) -> None:
        a, b = (self._rows(value) for value in node.inputs)
        self._to_rows(node, lambda out: self._model.add(a, b, out))

    def scale(self, _: int, node: Node) -> None:
        x = self._rows(node.inputs[0])
        self._to_rows(node, lambda out: self._model.scale(x, node.attrs["by"], out))

    def softcap(self, _: int, node: Node) -> None:
        x = self._rows(node.inputs[0])
        self._to_rows(node, lambda out: self._model.softcap(x, node.attrs["cap"], out))

    def select_rows(self, _: int, node: Node) -> None:
        x = self._rows(node.inputs[0])
        self._to_rows(node, lambda out: self._model.select_rows(x, out), per_row=True)

    def pool(self, _: int, node: Node) -> None:
        x, kind = self._rows(node.inputs[0]), node.attrs["kind"]
        self._to_rows(node, lambda out: self._model.pool(kind, x, out), per_row=True)

    def moe(self, _: int, node: Node) -> None:
        x, attrs = node.inputs[0], node.attrs
        router_name, *names = node.weights
        router = self._weights.reader(router_name)
        gate, up, down = (self._weights.experts(name) for name in names)
        orders = self._weights.expert_orders(names[0])  # gate's, and up's
        place = Place(self._places[x.id].per_row)
        scores = self._pool.rows(place, attrs["n_experts"])
        self._model.linear(_label((router_name,)), self._act(x, router), router.matrix, None, scores, False)
        used, norm, act = attrs["n_used"], attrs["norm"], attrs["act"]
        self._to_rows(
            node,
            lambda out: self._model.moe(
                "moe", scores, self._rows(x), gate, up, down, orders, used, norm, act, out
            ),
        )
        self._pool.release(place)


def _label(names: tuple[str, ...]) -> str:
    """What the profile calls a linear: the weights' names without the layer."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    return "+".join(part[-1] for part in parts)


_OPS: dict[str, Callable[[Lowering, int, Node], None]] = {
    "embed": Lowering.embed,
    "rms_norm": Lowering.rms_norm,
    "layer_norm": Lowering.layer_norm,
    "add_rms_norm": Lowering.add_rms_norm,
    "linear": Lowering.linear,
    "gated_linear": Lowering.gated_linear,
    "rope": Lowering.rope,
    "attention": Lowering.attention,
    "rope_attention": Lowering.attention,
    "act_mul": Lowering.act_mul,
    "gelu": Lowering.gelu,
    "add": Lowering.add,
    "scale": Lowering.scale,
    "softcap": Lowering.softcap,
    "select_rows": Lowering.select_rows,
    "pool": Lowering.pool,
    "moe": Lowering.moe,
}
_MAY_SKIP_BARRIER = frozenset({"rms_norm", "layer_norm"})
