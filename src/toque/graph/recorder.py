"""Records a model as a graph: one method per op of `toque.graph.ir`, each checking its inputs' widths.

A model file calls these in the order of the forward pass and gets values back; nothing is computed. The
recorder knows which weights the checkpoint has, so a missing one is an error at load that names it, never a
random matrix.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from toque.errors import FormatError, UnsupportedModelError
from toque.graph.ir import Graph, KVLayer, Node, RopeSpec, Value

POOLINGS = ("mean", "cls", "last")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Recorder:
    """Collects nodes in execution order.

    A wrong width or an absent weight raises before anything is loaded.
    """

    def __init__(self, tensor_names: Collection[str]) -> None:
        self._names = frozenset(tensor_names)
        self._nodes: list[Node] = []
        self._kv: list[KVLayer] = []
        self._next = 0

    def has(self, weight: str) -> bool:
        return weight in self._names

    def optional(self, weight: str) -> str:
        """The name itself when the checkpoint has that tensor, "" otherwise."""
        return weight if weight in self._names else ""

    def finish(self, output: Value) -> Graph:
        return Graph(tuple(self._nodes), output, tuple(self._kv))

    # One method per op, in the order of the table in graph/ir.py.

    def embed(self, table: str, width: int, *, scale: float = 1.0, ids: str = "tokens") -> Value:
        attrs = {"scale": float(scale), "ids": ids}
        return self._add("embed", (), width, (self._need(table),), attrs)

    def rms_norm(self, x: Value, gain: str, *, eps: float, group: int = 0) -> Value:
        """``group`` > 0 normalises each run of that many elements by itself; the gain then has ``group`` elements."""
        if group:
            _divides("rms_norm group", group, x.width)
        return self._add("rms_norm", (x,), x.width, (self._need(gain),), {"eps": float(eps), "group": group})

    def layer_norm(self, x: Value, gain: str, bias: str, *, eps: float) -> Value:
        return self._add(
            "layer_norm", (x,), x.width, (self._need(gain), self._need(bias)), {"eps": float(eps)}
        )

    def linear(self, x: Value, weight: str, width: int, *, bias: str = "") -> Value:
        """x · Wᵀ (+ bias); ``weight`` is [width, x.width]."""
        if bias:
            self._need(bias)
        return self._add("linear", (x,), width, (self._need(weight),), {"bias": (bias,)})

    def rope(self, x: Value, *, head_dim: int, rope: RopeSpec) -> Value:
        _divides("rope head_dim", head_dim, x.width)
        if 2 * len(rope.inv_freq) > head_dim:
            raise UnsupportedModelError(
                f"rope rotates {2 * len(rope.inv_freq)} dimensions, the head has only {head_dim}",
                param="rope_dim",
            )
        return self._add("rope", (x,), x.width, (), {"head_dim": head_dim, "rope": rope})

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        scale: float = 0.0,
        window: int = 0,
        softcap: float = 0.0,
        causal: bool = True,
    ) -> Value:
        """Appends a KV layer and attends over it.

        ``scale`` 0 means 1/√head_dim; ``window`` counts the token itself.
        """
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise UnsupportedModelError(
                f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}",
                param="n_kv_heads",
            )
        for name, value, heads in (("q", q, n_heads), ("k", k, n_kv_heads), ("v", v, n_kv_heads)):
            _same(f"attention {name}", value.width, heads * head_dim)
        attrs = {
            "layer": len(self._kv),
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "scale": float(scale) or head_dim**-0.5,
            "window": window,
            "softcap": float(softcap),
            "causal": causal,
        }
        self._kv.append(KVLayer(n_kv_heads, head_dim, window))
        return self._add("attention", (q, k, v), n_heads * head_dim, (), attrs)

    def act_mul(self, gate: Value, up: Value, *, act: str) -> Value:
        _same("act_mul", gate.width, up.width)
        return self._add("act_mul", (gate, up), gate.width, (), {"act": _activation(act)})

    def gelu(self, x: Value, *, tanh: bool) -> Value:
        return self._add("gelu", (x,), x.width, (), {"tanh": tanh})

    def add(self, a: Value, b: Value) -> Value:
        _same("add", a.width, b.width)
        return self._add("add", (a, b), a.width)

    def scale(self, x: Value, *, by: float) -> Value:
        return self._add("scale", (x,), x.width, (), {"by": float(by)})

    def softcap(self, x: Value, *, cap: float) -> Value:
        if cap <= 0:
            raise UnsupportedModelError(f"softcap must be positive, got {cap}", param="softcap")
        return self._add("softcap", (x,), x.width, (), {"cap": float(cap)})

    def select_rows(self, x: Value) -> Value:
        return self._add("select_rows", (x,), x.width)

    def pool(self, x: Value, *, kind: str) -> Value:
        if kind not in POOLINGS:
            raise UnsupportedModelError(
                f"pooling must be one of {', '.join(POOLINGS)}, got {kind!r}", param="pooling"
            )
        return self._add("pool", (x,), x.width, (), {"kind": kind})

    def moe(
        self,
        x: Value,
        *,
        router: str,
        gate: str,
        up: str,
        down: str,
        n_experts: int,
        n_used: int,
        ffn_size: int,
        act: str,
        norm: bool = True,
    ) -> Value:
        """A gated ffn of ``n_used`` experts per token; gate and up are [experts, ffn_size, x.width]."""
        if not 1 <= n_used <= n_experts:
            raise UnsupportedModelError(
                f"{n_used} of {n_experts} experts cannot be used", param="n_experts_used"
            )
        weights = tuple(self._need(name) for name in (router, gate, up, down))
        attrs = {
            "n_experts": n_experts,
            "n_used": n_used,
            "ffn_size": ffn_size,
            "act": _activation(act),
            "norm": norm,
        }
        return self._add("moe", (x,), x.width, weights, attrs)

    def _need(self, weight: str) -> str:
        if weight not in self._names:
            raise FormatError("the model needs this tensor and the checkpoint does not have it", field=weight)
        return weight

    def _add(
        self,
        op: str,
        inputs: tuple[Value, ...],
        width: int,
        weights: tuple[str, ...] = (),
        attrs: dict[str, Any] | None = None,
    ) -> Value:
        if width < 1:
            raise UnsupportedModelError(f"{op} would produce {width} columns", param=op)
        output = Value(self._next, width)
        self._next += 1
        self._nodes.append(Node(op, inputs, (output,), weights, attrs or {}))
        return output


def _same(what: str, width: int, expected: int) -> None:
    if width != expected:
        raise UnsupportedModelError(f"{what} is {width} wide where {expected} is expected", param=what)


def _divides(what: str, part: int, whole: int) -> None:
    if part < 1 or whole % part:
        raise UnsupportedModelError(f"{what} {part} does not divide the width {whole}", param=what)


def _activation(act: str) -> str:
    if act not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {act!r} is not one of {', '.join(ACTIVATIONS)}", param="hidden_act"
        )
    return act
