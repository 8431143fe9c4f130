"""The op vocabulary and the recorded form of a model.

A graph is a list of nodes over values of shape [tokens, width], recorded once at load. It names no device,
dtype or layout. ``Graph.kv`` lists the KV cache layers in order.

Recorded ops (inputs → outputs; ``w:`` weights by checkpoint name; attributes)

=============== ==============================================================================================
embed           () → x                 w: table; ``scale``; ``ids``: "tokens" | "positions" | "first" (row 0 for
                                       every token)
rms_norm        x → x                  w: gain; ``eps``; ``group`` (0: the whole row, else per head of that
                                       width)
layer_norm      x → x                  w: gain, bias; ``eps``
linear          x → y…                 w: one matrix per output; ``bias``: tuple of names or "" per matrix
rope            x → x                  ``head_dim``, ``rope``: RopeSpec
attention       q, k, v → o            ``layer`` (index into Graph.kv), ``n_heads``, ``n_kv_heads``,
                                       ``head_dim``, ``scale``, ``window`` (0: none), ``softcap`` (0: none),
                                       ``causal``
act_mul         gate, up → h           ``act``: "silu" | "gelu_tanh" | "gelu"
gelu            x → x                  ``tanh``: bool
add             a, b → a + b
scale           x → x                  ``by``
softcap         x → c·tanh(x / c)      ``cap``
select_rows     x → x                  keeps only StepBatch.rows
pool            x → e                  ``kind``: "mean" | "cls" | "last", one row per sequence: StepBatch.rows then
                                       lists one token of each, and each sequence is whole in its step
moe             x → y                  w: router, gate, up, down (experts stacked); ``n_experts``, ``n_used``,
                                       ``ffn_size`` of each, ``act``, ``norm``: each token's weights (softmax over
                                       all experts) are divided by the sum of the ``n_used`` largest
=============== ==============================================================================================

Ops that only the fusion pass makes (`toque.graph.fuse`); every backend runs both forms

=============== ==============================================================================================
linear          several matrices over one input, outputs in the same order (q/k/v); with attr ``residual``
                True the last input is added to the single output
gated_linear    x → h                  w: gate, up; ``act``, ``bias``: act(gate·x) * (up·x)
rope_attention  q, k, v → o            attention's attributes plus ``rope``: RopeSpec; optional w: q_norm,
                                       k_norm with ``norm_eps`` (head-wise RMS norm before the rotation)
add_rms_norm    a, b → sum, normed     w: gain; ``eps``
=============== ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """Rotary embedding of the first ``2 * len(inv_freq)`` dimensions of each head.

    Halves layout: element i of the first half pairs with element i of the second. cos and sin are multiplied
    by ``mscale`` (yarn's attention factor; 1 otherwise).
    """

    inv_freq: npt.NDArray[np.float64]
    mscale: float = 1.0


@dataclass(frozen=True, slots=True)
class Value:
    """A [tokens, width] intermediate."""

    id: int
    width: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    n_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]
    output: Value  # logits [R, vocab], or an embedding
    kv: tuple[KVLayer, ...]
