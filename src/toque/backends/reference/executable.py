"""Walks a graph node by node over a ragged batch, with its KV cache in numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from toque.backends.base import BLOCK_SIZE, BackendOptions, Float32, StepBatch, StepResult
from toque.backends.reference import ops
from toque.backends.reference.sampler import Sampler, log_softmax, top_alternatives
from toque.errors import EngineError
from toque.graph.ir import Graph, Node
from toque.graph.shapes import check_shapes
from toque.types import SamplingParams

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint


class ReferenceBackend:
    """Every weight as float32, every op as its plain formula; runs recorded and fused graphs alike."""

    name = "reference"

    def lower(self, graph: Graph, checkpoint: Checkpoint, options: BackendOptions) -> ReferenceExecutable:
        from toque.formats.dequant import dequantize

        check_shapes(graph, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
        weights = {
            name: dequantize(checkpoint.tensors[name])
            for node in graph.nodes
            for name in (*node.weights, *node.attrs.get("bias", ()))
            if name
        }
        return ReferenceExecutable(graph, weights, options)


KV_GROUP = 32  # dims of a token's key or value that share a scale in an int8 cache


def int8_cache(x: Float32) -> Float32:
    """Keys or values [T, Hkv, D] as an int8 cache gives them back: codes times the f16 scale of their 32 dims."""
    out = np.empty_like(x)
    for begin in range(0, x.shape[-1], KV_GROUP):
        part = x[..., begin : begin + KV_GROUP]
        scale = (np.abs(part).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
        scale = scale.astype(np.float32)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        out[..., begin : begin + KV_GROUP] = np.clip(np.rint(part * inverse), -127, 127) * scale
    return out


class ReferenceExecutable:
    """See `toque.backends.base.Executable`. The whole step is one pass over the nodes; nothing is reused."""

    def __init__(self, graph: Graph, weights: dict[str, Float32], options: BackendOptions) -> None:
        self.vocab_size = graph.output.width
        self.kv_bytes_per_block = sum(2 * BLOCK_SIZE * kv.n_kv_heads * kv.head_dim * 4 for kv in graph.kv)
        self._graph = graph
        self._weights = weights
        self._options = options
        self._stored = int8_cache if options.kv_dtype == "int8" else _as_it_is
        self._valid_vocab = min(options.valid_vocab or self.vocab_size, self.vocab_size)
        self._samplers: list[Sampler | None] = [None] * options.max_sequences
        self._keys: list[Float32] = []
        self._values: list[Float32] = []

    def allocate_kv(self, n_blocks: int) -> None:
        shapes = [(n_blocks, BLOCK_SIZE, kv.n_kv_heads, kv.head_dim) for kv in self._graph.kv]
        self._keys = [np.zeros(shape, np.float32) for shape in shapes]
        self._values = [np.zeros(shape, np.float32) for shape in shapes]

    def open_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None:
        self._samplers[slot] = Sampler(
            self.vocab_size, self._valid_vocab, params, prompt, output, suppress, suppress_until
        )

    def close_slot(self, slot: int) -> None:
        self._samplers[slot] = None

    def step(self, batch: StepBatch) -> StepResult:
        logits = self.logits(batch)
        tokens = batch.targets.copy()
        for row, (slot, target) in enumerate(zip(batch.slots, batch.targets, strict=True)):
            if target < 0 and batch.verified_by(row, tokens):
                sampler = self._samplers[slot]
                if sampler is None:
                    raise EngineError(f"row {row} samples from slot {slot}, which is not open")
                mask = None if batch.masks is None else batch.masks[row]
                tokens[row] = sampler.sample(logits[row], mask)
        result = StepResult(tokens)
        if len(batch.top) and batch.top.max() >= 0:
            _report_logprobs(result, logits, batch, self._valid_vocab)
        return result

    def logits(self, batch: StepBatch) -> Float32:
        run = _Step(self._weights, self._keys, self._values, batch, self._stored)
        for node in self._graph.nodes:
            run.execute(node)
        return run.values[self._graph.output.id]

    def close(self) -> None:
        self._keys, self._values, self._weights = [], [], {}


def _report_logprobs(result: StepResult, logits: Float32, batch: StepBatch, valid_vocab: int) -> None:
    n_rows, n_top = len(batch.rows), int(batch.top.max())
    result.logprobs = np.zeros(n_rows, np.float32)
    result.top_ids = np.full((n_rows, n_top), -1, np.int32)
    result.top_logprobs = np.full((n_rows, n_top), -np.inf, np.float32)
    for row in np.flatnonzero(batch.top >= 0):
        wanted, token = batch.top[row], result.tokens[row]
        logprobs = log_softmax(logits[row])
        result.logprobs[row] = logprobs[token] if token >= 0 else -np.inf
        ids = top_alternatives(logits[row], int(wanted), valid_vocab)
        result.top_ids[row, : len(ids)] = ids
        result.top_logprobs[row, : len(ids)] = logprobs[ids]


class _Step:
    """One pass over the graph: the batch, and every value computed so far by id."""

    def __init__(
        self,
        weights: dict[str, Float32],
        keys: list[Float32],
        values: list[Float32],
        batch: StepBatch,
        stored: Callable[[Float32], Float32],
    ) -> None:
        self.values: dict[int, Float32] = {}
        self._weights = weights
        self._keys = keys
        self._values = values
        self._batch = batch
        self._stored = stored  # what the cache gives back of what is written to it

    def execute(self, node: Node) -> None:
        run = _OPS.get(node.op)
        if run is None:
            raise EngineError(f"the reference backend does not know op {node.op!r}")
        outputs = run(self, node, *(self.values[value.id] for value in node.inputs))
        for value, output in zip(
            node.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True
        ):
            self.values[value.id] = output

    def embed(self, node: Node) -> Float32:
        table = self._weights[node.weights[0]]
        if node.attrs["ids"] == "first":
            return np.repeat(table[:1], len(self._batch.tokens), axis=0)
        tokens = self._batch.positions if node.attrs["ids"] == "positions" else self._batch.tokens
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(table):
            raise EngineError(
                f"{node.attrs['ids']} must be 0..{len(table) - 1}, got {tokens.min()}..{tokens.max()}"
            )
        rows: Float32 = table[tokens] * np.float32(node.attrs["scale"])
        return rows

    def linear(self, node: Node, x: Float32, residual: Float32 | None = None) -> Any:
        biases = node.attrs["bias"]
        outputs = [
            ops.linear(x, self._weights[name], self._weights[bias] if bias else None)
            for name, bias in zip(node.weights, biases, strict=True)
        ]
        return tuple(outputs) if residual is None else residual + outputs[0]

    def gated_linear(self, node: Node, x: Float32) -> Float32:
        gate, up = self.linear(node, x)
        hidden: Float32 = np.multiply(ops.activation(gate, node.attrs["act"]), up)
        return hidden

    def attention(self, node: Node, q: Float32, k: Float32, v: Float32) -> Float32:
        """Writes k and v [T, Hkv·D] into their blocks, then lets each token read what it may see."""
        batch, attrs = self._batch, node.attrs
        n_kv_heads, head_dim, window = attrs["n_kv_heads"], attrs["head_dim"], attrs["window"]
        keys, values = self._keys[attrs["layer"]], self._values[attrs["layer"]]
        out = np.empty((len(q), attrs["n_heads"], head_dim), np.float32)
        for sequence, (start, stop) in enumerate(pairwise(batch.starts)):
            table, context = batch.block_tables[sequence], int(batch.context[sequence])
            positions = batch.positions[start:stop]
            blocks, offsets = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
            for cache, new in ((keys, k), (values, v)):
                cache[blocks, offsets] = self._stored(new[start:stop].reshape(-1, n_kv_heads, head_dim))
            used = table[: -(-context // BLOCK_SIZE)]
            seen_keys, seen_values = (_by_head(cache[used]) for cache in (keys, values))
            for row, position in zip(range(start, stop), positions, strict=True):
                last = int(position) + 1 if attrs["causal"] else context
                first = max(0, last - window) if window else 0
                out[row] = ops.attend(
                    q[row].reshape(-1, head_dim),
                    seen_keys[:, first:last],
                    seen_values[:, first:last],
                    attrs["scale"],
                    attrs["softcap"],
                )
        return out.reshape(len(q), -1)

    def rope_attention(self, node: Node, q: Float32, k: Float32, v: Float32) -> Float32:
        head_dim, rope = node.attrs["head_dim"], node.attrs["rope"]
        if node.weights:
            eps = node.attrs["norm_eps"]
            q = ops.rms_norm(q, self._weights[node.weights[0]], eps, head_dim)
            k = ops.rms_norm(k, self._weights[node.weights[1]], eps, head_dim)
        q = ops.rope(q, self._batch.positions, head_dim, rope)
        k = ops.rope(k, self._batch.positions, head_dim, rope)
        return self.attention(node, q, k, v)

    def rms_norm(self, node: Node, x: Float32) -> Float32:
        attrs = node.attrs
        return ops.rms_norm(x, self._weights[node.weights[0]], attrs["eps"], attrs.get("group", 0))

    def add_rms_norm(self, node: Node, a: Float32, b: Float32) -> tuple[Float32, Float32]:
        total = a + b
        return total, self.rms_norm(node, total)

    def layer_norm(self, node: Node, x: Float32) -> Float32:
        gain, bias = (self._weights[name] for name in node.weights)
        return ops.layer_norm(x, gain, bias, node.attrs["eps"])

    def rope(self, node: Node, x: Float32) -> Float32:
        attrs = node.attrs
        return ops.rope(x, self._batch.positions, attrs["head_dim"], attrs["rope"])

    def pool(self, node: Node, x: Float32) -> Float32:
        starts = self._batch.starts
        if node.attrs["kind"] != "mean":
            return x[starts[:-1] if node.attrs["kind"] == "cls" else starts[1:] - 1]
        return np.stack([x[a:b].mean(axis=0) for a, b in pairwise(starts)])

    def moe(self, node: Node, x: Float32) -> Float32:
        router, gate, up, down = (self._weights[name] for name in node.weights)
        attrs = node.attrs
        return ops.moe(x, router, (gate, up, down), attrs["n_used"], attrs["act"], attrs["norm"])


def _as_it_is(x: Float32) -> Float32:
    return x


def _by_head(blocks: Float32) -> Float32:
    """[blocks, 32, Hkv, D] → [Hkv, positions, D], contiguous."""
    _, _, n_kv_heads, head_dim = blocks.shape
    return np.ascontiguousarray(blocks.reshape(-1, n_kv_heads, head_dim).transpose(1, 0, 2))


_OPS: dict[str, Callable[..., Any]] = {
    "embed": _Step.embed,
    "rms_norm": _Step.rms_norm,
    "layer_norm": _Step.layer_norm,
    "linear": _Step.linear,
    "rope": _Step.rope,
    "attention": _Step.attention,
    "act_mul": lambda _, node, gate, up: ops.activation(gate, node.attrs["act"]) * up,
    "gelu": lambda _, node, x: ops.gelu(x, tanh=node.attrs["tanh"]),
    "add": lambda _, node, a, b: a + b,
    "scale": lambda _, node, x: x * np.float32(node.attrs["by"]),
    "softcap": lambda _, node, x: ops.soft_cap(x, node.attrs["cap"]),
    "select_rows": lambda step, _, x: x[step._batch.rows],
    "pool": _Step.pool,
    "moe": _Step.moe,
    "gated_linear": _Step.gated_linear,
    "rope_attention": _Step.rope_attention,
    "add_rms_norm": _Step.add_rms_norm,
}
