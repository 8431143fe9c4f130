"""Native kernels of the CPU backend.

Made by `python -m nanobind.stubgen -m toque._native`, array shapes left out.
"""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

def isas() -> list[str]:
    """Instruction sets this build has and this machine runs, best first."""

def resolve_isa(isa: str = "") -> str:
    """
    The instruction set that `isa` (or TOQUE_ISA, or the best) selects. ValueError when it cannot run here.
    """

def tile_max(isa: str = "") -> int: ...

class Arena:
    """Memory for packed weights, on huge pages where possible."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def used(self) -> int: ...
    @property
    def capacity(self) -> int: ...

class PackedMatrix:
    """A weight matrix in the tile16 layout, inside an Arena."""

    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def kv_bytes(head_dim: int, int8: bool = ..., isa: str = ...) -> int:
    """Bytes of the cache that one head takes for the key and value of one token."""

def packed_size(dtype: str, rows: int, cols: int) -> int:
    """
    Bytes a matrix of this GGML type takes once packed (a multiple of 64). ValueError when it has no packed form.
    """

def pack(
    arena: Arena,
    dtype: str,
    raw: NDArray[numpy.uint8],
    cols: int,
    row_order: NDArray[numpy.int64] | None = None,
    threads: int = 1,
) -> PackedMatrix:
    """Pack raw rows (uint8[rows, bytes]) of a GGML type into the arena."""

def linear(
    isa: str,
    weight: PackedMatrix,
    x: NDArray[numpy.float32],
    *,
    bias: NDArray[numpy.float32] | None = None,
    residual: NDArray[numpy.float32] | None = None,
    up: PackedMatrix | None = None,
    up_bias: NDArray[numpy.float32] | None = None,
    activation: str = "",
    activated: bool = False,
    to_act: bool = False,
    chunk: int = 0,
) -> NDArray[numpy.float32]: ...
def time_linear(
    isa: str,
    weights: Sequence[PackedMatrix],
    x: NDArray[numpy.float32],
    threads: int = 1,
    repeats: int = 5,
    gated: bool = False,
) -> float: ...
def embed(
    isa: str, weight: PackedMatrix, ids: NDArray[numpy.int32], scale: float = 1.0
) -> NDArray[numpy.float32]: ...
def quantize(isa: str, x: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
    """What the int8 packed activations of x stand for."""

class Rows:
    """A float32 buffer with a row per token, or per wanted row."""

    @property
    def width(self) -> int: ...

class ActBuffer:
    """A buffer of packed activations, the input of linear ops."""

    @property
    def width(self) -> int: ...

class RopeTable:
    """Angles of a rotary embedding by position."""

    def __init__(self, arg0: NDArray[numpy.float64], arg1: float, /) -> None: ...

class Model:
    """
    A model's step: a list of ops over buffers, its KV cache, and its sampler.
    """

    def __init__(
        self, *, threads: int, isa: str, max_tokens: int, max_rows: int, max_sequences: int, vocab_limit: int
    ) -> None: ...
    position_limit: int
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def add_kv_layer(self, heads: int, head_dim: int, int8: bool = False) -> None: ...
    def act_kind(self, weight: PackedMatrix) -> int:
        """Matrices with the same number read the same kind of activations."""

    @property
    def kv_bytes_per_block(self) -> int: ...
    def allocate_kv(self, blocks: int) -> None: ...
    def rows(self, width: int, per_row: bool) -> Rows: ...
    def act(self, reader: PackedMatrix, per_row: bool, per_worker: bool) -> ActBuffer:
        """A buffer of the kind and width that `reader`, a packed matrix, takes."""

    def embed(self, table: PackedMatrix, ids: str, scale: float, out: Rows) -> None: ...
    def moe(
        self,
        label: str,
        scores: Rows,
        x: Rows,
        gate: Sequence[PackedMatrix],
        up: Sequence[PackedMatrix],
        down: Sequence[PackedMatrix],
        orders: Sequence[NDArray[numpy.int64]],
        used: int,
        norm: bool,
        act_name: str,
        out: Rows,
    ) -> None:
        """
        `scores` are the router's, a column for each expert. `orders`: the column of `x` that each input of an
        expert's gate and up is, none for as they come; or nothing at all.
        """

    def pool(self, kind: str, x: Rows, out: Rows) -> None: ...
    def rms_norm(
        self,
        x: Rows,
        gain: NDArray[numpy.float32],
        eps: float,
        group: int,
        rows: Rows | None,
        act: ActBuffer | None,
    ) -> None: ...
    def add_rms_norm(
        self,
        a: Rows,
        b: Rows,
        gain: NDArray[numpy.float32],
        eps: float,
        sum: Rows,
        rows: Rows | None,
        act: ActBuffer | None,
    ) -> None: ...
    def layer_norm(
        self,
        x: Rows,
        gain: NDArray[numpy.float32],
        bias: NDArray[numpy.float32],
        eps: float,
        rows: Rows | None,
        act: ActBuffer | None,
    ) -> None: ...
    def pack(self, x: Rows, out: ActBuffer) -> None: ...
    def pack_gathered(self, x: Rows, out: ActBuffer, order: NDArray[numpy.int64]) -> None:
        """`order`: the column of `x` that each value of `out` is."""

    def linear(
        self,
        label: str,
        x: ActBuffer,
        weight: PackedMatrix,
        bias: NDArray[numpy.float32] | None,
        out: Rows,
        add: bool,
    ) -> None:
        """`add`: to what `out` already holds."""

    def shared_linear(
        self,
        label: str,
        x: ActBuffer,
        weights: Sequence[PackedMatrix],
        biases: Sequence[NDArray[numpy.float32] | None],
        outs: Sequence[Rows],
    ) -> None: ...
    def gated_linear(
        self,
        label: str,
        x: ActBuffer,
        gate: PackedMatrix,
        up: PackedMatrix,
        gate_bias: NDArray[numpy.float32] | None,
        up_bias: NDArray[numpy.float32] | None,
        act_name: str,
        rows: Rows | None,
        act: ActBuffer | None,
    ) -> None: ...
    def rotate(self, x: Rows, head_dim: int, rope: RopeTable, out: Rows) -> None: ...
    def attention(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        *,
        layer: int,
        heads: int,
        scale: float,
        window: int,
        softcap: float,
        causal: bool,
        rope: RopeTable | None,
        q_norm: NDArray[numpy.float32] | None,
        k_norm: NDArray[numpy.float32] | None,
        norm_eps: float,
        rows: Rows | None,
        act: ActBuffer | None,
    ) -> None: ...
    def act_mul(
        self, act_name: str, gate: Rows, up: Rows, rows: Rows | None, act: ActBuffer | None
    ) -> None: ...
    def activate(self, act_name: str, x: Rows, rows: Rows | None, act: ActBuffer | None) -> None: ...
    def add(self, a: Rows, b: Rows, out: Rows) -> None: ...
    def scale(self, x: Rows, by: float, out: Rows) -> None: ...
    def softcap(self, x: Rows, cap: float, out: Rows) -> None: ...
    def select_rows(self, x: Rows, out: Rows) -> None: ...
    def finish(self, output: Rows, valid_vocab: int, slots: int) -> None: ...
    def open_slot(
        self,
        slot: int,
        *,
        greedy: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        seed: int,
        logit_bias: Sequence[tuple[int, float]],
        suppress: Sequence[int],
        suppress_until: int,
        prompt: NDArray[numpy.int32],
        output: NDArray[numpy.int32],
    ) -> None: ...
    def close_slot(self, slot: int) -> None: ...
    def logits(
        self,
        tokens: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        starts: NDArray[numpy.int32],
        context: NDArray[numpy.int32],
        block_tables: NDArray[numpy.int32],
        rows: NDArray[numpy.int32],
    ) -> NDArray[numpy.float32]: ...
    def step(
        self,
        tokens: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        starts: NDArray[numpy.int32],
        context: NDArray[numpy.int32],
        block_tables: NDArray[numpy.int32],
        rows: NDArray[numpy.int32],
        slots: NDArray[numpy.int32],
        targets: NDArray[numpy.int32],
        top: NDArray[numpy.int32],
        masks: NDArray[numpy.uint32] | None,
    ) -> tuple[
        NDArray[numpy.int32],
        NDArray[numpy.float32] | None,
        NDArray[numpy.int32] | None,
        NDArray[numpy.float32] | None,
    ]: ...
    def set_profiling(self, on: bool) -> None: ...
    def profile(self) -> list[tuple[str, float]]:
        """(label, seconds) of each op since profiling was switched on."""
    def attention_work(self) -> list[tuple[int, int]]:
        """Of the last step, for each kind of attention layer: (chunks of the cache that one layer reads, query rows
        that attend them, summed over the chunks). Sequences attended together read a chunk once."""

class Sampler:
    """
    Per-request sampling state in slots; see toque.backends.reference.sampler.
    """

    def __init__(self, vocab: int, valid_vocab: int, slots: int, isa: str = "") -> None: ...
    def open(
        self,
        slot: int,
        prompt: NDArray[numpy.int32],
        output: NDArray[numpy.int32],
        *,
        greedy: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        seed: int,
        logit_bias: Sequence[tuple[int, float]],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None: ...
    def close(self, slot: int) -> None: ...
    def run(
        self,
        logits: NDArray[numpy.float32],
        slot: int,
        target: int = -1,
        top: int = -1,
        mask: NDArray[numpy.uint32] | None = None,
    ) -> tuple[int, float, list[int], list[float]]:
        """
        (token, logprob, alternatives' ids, their logprobs) of one row; changes `logits` in place.
        """
