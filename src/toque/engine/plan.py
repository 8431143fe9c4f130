"""What a model will need and how fast it should be, from its description alone: no weight is read.

Decoding one sequence reads every weight once per token, so its speed is about bandwidth over bytes; `rehearsal` knows
better, where there is memory for it. A prompt is bound by multiplications, so its speed is the kernels' rate over those
per token. Both rates are measured on this machine, on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toque.backends.base import BLOCK_SIZE
from toque.engine.loader import KV_SHARE, SCORED_ROWS
from toque.engine.options import EngineOptions
from toque.errors import UnsupportedModelError

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint, TensorData
    from toque.graph.ir import Graph

# What a whole step reaches of the rates of a bare read and of a bare kernel: the rest is attention, norms, sampling.
DECODE_SHARE = 0.75
PREFILL_SHARE = 0.7
_MATRIX_OPS = frozenset({"embed", "linear", "gated_linear", "moe"})
_CONTEXTS = (2048, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured here: bytes per second that weights can be read at, multiplications per second of the kernels."""

    bandwidth: float
    multiplications: float


@dataclass(frozen=True, slots=True)
class Fit:
    """At most ``sequences`` of ``context`` tokens each have room in the cache at once."""

    context: int
    sequences: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. ``kv_bytes`` is what the cache may take: the engine's bound, or its share of the memory left."""

    file_bytes: int
    weight_bytes: int
    read_per_token: int  # of the weights: without the embedding table, and with the experts that a token uses
    multiplications: int  # per token of a prompt, whose last one alone gives logits
    kernels: str  # the type of the weights that most of these are with
    kv_per_token: int
    workspace_bytes: int
    available: int | None
    kv_bytes: int | None
    fits: tuple[Fit, ...]

    @property
    def enough(self) -> bool | None:
        """Whether weights, workspace and one sequence fit; None when the machine does not say."""
        return None if self.available is None else bool(self.fits and self.fits[0].sequences)

    def decode_rate(self, rates: MachineRates, context: int) -> float:
        """Tokens per second of one sequence whose context is ``context`` tokens."""
        return DECODE_SHARE * rates.bandwidth / (self.read_per_token + context * self.kv_per_token)

    def prefill_rate(self, rates: MachineRates) -> float:
        """Tokens per second of a prompt of a few hundred tokens."""
        return PREFILL_SHARE * rates.multiplications / max(self.multiplications, 1)


def plan_memory(
    checkpoint: Checkpoint,
    options: EngineOptions,
    packed_size: Callable[[str, int, int], int],
    kv_size: Callable[[int, bool], int],
    available: int | None,
) -> MemoryPlan:
    """Sizes for the cpu backend. ``packed_size`` is the bytes of a matrix of a GGML type once packed, ``kv_size``
    those of one token's key and value of one head of so many dims, in an int8 cache or a 16-bit one.

    Raises ModelError for a tensor that has no packed form.
    """
    from toque.graph.fuse import fuse
    from toque.models import build_graph

    config = checkpoint.config
    context = options.context_length or config.context_length
    graph = fuse(build_graph(replace(config, context_length=context), checkpoint.tensors.keys()))
    matrices = list(
        dict.fromkeys(name for node in graph.nodes if node.op in _MATRIX_OPS for name in node.weights)
    )
    tables = {name for node in graph.nodes if node.op == "embed" for name in node.weights}
    multiplied = {
        name for node in graph.nodes if node.op in _MATRIX_OPS and node.op != "embed" for name in node.weights
    }
    tensors = checkpoint.tensors
    packed = {name: _packed_bytes(tensors[name], packed_size) for name in matrices}
    others = sum(4 * math.prod(t.shape) for name, t in tensors.items() if name not in packed)
    share = config.n_experts_used / config.n_experts if config.n_experts else 1.0

    def used(name: str) -> float:
        return share if len(tensors[name].shape) == 3 else 1.0

    read = sum(size * used(name) for name, size in packed.items() if name not in tables - multiplied)
    products: dict[str, int] = {}
    for name in _of_every_token(graph) & multiplied:
        kind = tensors[name].dtype
        products[kind] = products.get(kind, 0) + int(math.prod(tensors[name].shape) * used(name))
    per_token = sum(kv.n_kv_heads * kv_size(kv.head_dim, options.kv_dtype == "int8") for kv in graph.kv)
    rows = max(options.max_sequences, SCORED_ROWS)
    widest = max(
        (value.width for node in graph.nodes for value in node.outputs if value is not graph.output),
        default=0,
    )
    # Logits of every row, and per token of a step about four values as wide as the widest (the ffn's).
    workspace = 4 * (rows * graph.output.width + 4 * options.max_batch_tokens * widest)
    weights = sum(packed.values()) + others
    kv_bytes = options.kv_memory_mb << 20 or None
    if kv_bytes is None and available is not None:
        kv_bytes = max(0, int((available - weights - workspace) * KV_SHARE))
    return MemoryPlan(
        file_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        weight_bytes=weights,
        read_per_token=int(read),
        multiplications=sum(products.values()),
        kernels=max(products, key=lambda kind: products[kind], default="F32"),
        kv_per_token=per_token,
        workspace_bytes=workspace,
        available=available,
        kv_bytes=kv_bytes,
        fits=tuple(_fits(context, per_token, kv_bytes, options.max_sequences)),
    )


def _of_every_token(graph: Graph) -> set[str]:
    """The weights of nodes that compute a row for every token, not only for the wanted ones."""
    selected: set[int] = set()
    weights: set[str] = set()
    for node in graph.nodes:
        if node.op in ("select_rows", "pool") or any(value.id in selected for value in node.inputs):
            selected |= {value.id for value in node.outputs}
        elif node.op != "embed":  # the table may be the output matrix as well
            weights |= set(node.weights)
    return weights


def _packed_bytes(tensor: TensorData, packed_size: Callable[[str, int, int], int]) -> int:
    *outer, rows, columns = (1, *tensor.shape) if len(tensor.shape) == 1 else tensor.shape
    try:
        return math.prod(outer) * packed_size(tensor.dtype, rows, columns)
    except ValueError as error:
        raise UnsupportedModelError(f"{tensor.name} ({tensor.dtype}): {error}", param=tensor.name) from None


def _fits(context: int, per_token: int, kv_bytes: int | None, most: int) -> Iterable[Fit]:
    """From short contexts to the model's own."""
    for length in sorted({min(length, context) for length in (*_CONTEXTS, context)}):
        block = per_token * BLOCK_SIZE
        blocks = -(-length // BLOCK_SIZE)
        fitting = most if kv_bytes is None or not block else min(most, kv_bytes // (block * blocks))
        yield Fit(length, fitting)
