"""The contract between the engine and whatever executes a model's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from toque.types import SamplingParams

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint
    from toque.graph.ir import Graph

BLOCK_SIZE = 32  # tokens per KV block, on every backend

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class StepBatch:
    """One engine step over S sequences and T tokens, ragged: prefill chunks and decodes side by side.

    ========================  ==========  ======================================================================
    ``tokens``                int32[T]    input ids, sequence after sequence
    ``positions``             int32[T]    their positions in their sequence
    ``starts``                int32[S+1]  tokens of sequence s are ``starts[s]:starts[s+1]`` (never empty)
    ``context``               int32[S]    KV length of s after this step = its last position + 1
    ``block_tables``          int32[S,W]  KV block of token position p is ``block_tables[s, p // 32]``; unused: 0
    ``rows``                  int32[R]    the token rows whose logits are wanted, ascending
    ``slots``                 int32[R]    sampler slot of each row
    ``targets``               int32[R]    -1: sample this row; >= 0: do not sample, report this token's logprob
    ``top``                   int32[R]    -1: no logprob wanted; n >= 0: sampled/target logprob and n alternatives
    ``masks``                 uint32[R,V32] or None  allowed-token bit masks (bit i of word w = token 32 w + i)
    ========================  ==========  ======================================================================

    R may be 0: a step that only computes the middle of a prompt. Arrays are C-contiguous. The executable never writes
    to them and keeps no reference after the call.

    Sampled rows of one slot for consecutive tokens are a verification of drafted tokens: each row is sampled, in the
    slot's state after the rows before it, while every row before it chose the token that the next one has as input.
    The rows after the first that chose another have token -1 and leave no trace in their slot.
    """

    tokens: Int32
    positions: Int32
    starts: Int32
    context: Int32
    block_tables: Int32
    rows: Int32
    slots: Int32
    targets: Int32
    top: Int32
    masks: npt.NDArray[np.uint32] | None = None

    def verified_by(self, row: int, tokens: Int32) -> bool:
        """Whether a sampled row is reached, given what those before it chose; one that verifies nothing always is."""
        before = row - 1
        if (
            before < 0
            or self.slots[before] != self.slots[row]
            or self.targets[before] >= 0
            or self.rows[before] + 1 != self.rows[row]
        ):
            return True
        return bool(tokens[before] == self.tokens[self.rows[row]])


@dataclass(slots=True)
class StepResult:
    """``tokens`` int32[R] (the target where one was given, -1 where no token is left to sample); logprob arrays only
    where some row asked for them.

    ``logprobs`` float32[R]; ``top_ids`` int32[R,K] and ``top_logprobs`` float32[R,K], K the largest ``top`` of the
    batch, best first. Logprobs are log-softmax of the model's raw logits, before bias, penalties and temperature.
    A row from which nothing can be sampled (every token removed by its mask, or logits that are no numbers) has token
    -1 and is not recorded in its slot; so has a row of a verification that was not reached, whose other entries mean
    nothing. Entries nobody asked for are 0 in ``logprobs``, -1 and -inf in the top arrays.
    """

    tokens: Int32
    logprobs: Float32 | None = None
    top_ids: Int32 | None = None
    top_logprobs: Float32 | None = None


class Executable(Protocol):
    """A model lowered onto a device, with its KV cache and its sampler state.

    Guarantee: the result for a row depends on its own sequence's tokens and sampler slot only, bit for bit, never on
    the rest of the batch, on how the prompt was cut into chunks or on where its KV blocks lie.
    """

    vocab_size: int
    kv_bytes_per_block: int  # all layers, one block of 32 tokens

    def allocate_kv(self, n_blocks: int) -> None:
        """Reserve the cache; pages are committed as they are first written. Called once, before `step`."""

    def open_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None:
        """Prepare sampler state for a request: penalties' counts from prompt and output so far.

        ``suppress`` ids cannot be sampled until ``suppress_until`` tokens have been generated (min_tokens).
        A seeded request draws number ``i`` of its stream for its i-th output token, so neighbours cannot disturb it.
        ``params.seed`` is never None here: the engine draws one for unseeded requests.
        """

    def close_slot(self, slot: int) -> None: ...

    def step(self, batch: StepBatch) -> StepResult:
        """Run the graph over the batch, write its KV, sample the rows with target -1 and record them in their slots."""

    def logits(self, batch: StepBatch) -> Float32:
        """float32[R, vocab]: as `step`, but returns raw logits and samples nothing. For tests and evaluation."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    threads: int = 0  # 0: the CPUs this process may use
    isa: str = ""  # "": the best this machine has; also TOQUE_ISA
    max_batch_tokens: int = 2048  # upper bound on T in any step
    max_sequences: int = 256  # upper bound on S and on R; also the number of sampler slots
    kv_dtype: str = "auto"  # how the KV cache stores its numbers: auto, bf16 (16 bits each), int8
    valid_vocab: int = 0  # ids at or above it are padding and can never be sampled; 0: all are valid


class Backend(Protocol):
    """Turns a recorded graph and a checkpoint into an executable. Raises ModelError when it cannot."""

    name: str

    def lower(self, graph: Graph, checkpoint: Checkpoint, options: BackendOptions) -> Executable: ...
