"""From texts, as token ids, to vectors: one step for a whole batch of them, and nothing kept afterwards.

::

    engine = load_embedding_engine(Path("all-MiniLM-L6-v2"))
    vectors = engine.embed([[101, 7592, 102], [101, 2088, 102]])  # float32 [2, 384]
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toque.backends.base import BLOCK_SIZE, BackendOptions, Float32, StepBatch
from toque.engine.loader import context_length
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, RequestError, UnsupportedModelError

if TYPE_CHECKING:
    from toque.backends.base import Executable
    from toque.formats.checkpoint import Checkpoint

Ids = Sequence[int]


class EmbeddingEngine:
    """Makes a vector of each text. Safe to use from several threads; calls take turns, batch by batch.

    A text's vector depends on the text alone, bit for bit, never on what else is in the call. ``dimension`` is the
    width of the vectors; ``context_length`` the most tokens of a text. Owns the executable.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        vocab_size: int,
        context_length: int,
        normalize: bool,
        max_batch_tokens: int,
        max_sequences: int,
    ) -> None:
        self.dimension = executable.vocab_size  # the width of the graph's output
        self.vocab_size = vocab_size
        self.context_length = min(context_length, max_batch_tokens)  # a text is never cut into steps
        self._executable = executable
        self._normalize = normalize
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._lock = threading.Lock()
        # A batch of n texts has at most one block per text that is not full.
        executable.allocate_kv(max_batch_tokens // BLOCK_SIZE + max_sequences)

    def embed(self, inputs: Sequence[Ids], *, dimensions: int | None = None) -> Float32:
        """float32 [len(inputs), dimensions]: the vectors, in order.

        ``dimensions`` keeps the first so many numbers of each vector and makes its length 1 again. Raises
        RequestError naming the first input that cannot be embedded, before anything runs.
        """
        kept = self.dimension if dimensions is None else dimensions
        if not 1 <= kept <= self.dimension:
            raise RequestError(
                f"dimensions must be between 1 and {self.dimension}, got {dimensions}", param="dimensions"
            )
        for index, ids in enumerate(inputs):
            self._check(index, ids)
        vectors = np.empty((len(inputs), self.dimension), np.float32)
        for first, last in self._batches(inputs):
            with self._lock:
                vectors[first:last] = self._executable.logits(_batch(inputs[first:last]))
        if kept < self.dimension:
            vectors = np.ascontiguousarray(vectors[:, :kept])
        return _normalized(vectors) if self._normalize or kept < self.dimension else vectors

    def close(self) -> None:
        with self._lock:
            self._executable.close()

    def _check(self, index: int, ids: Ids) -> None:
        param = f"input[{index}]"
        if not ids:
            raise RequestError(f"input {index} has no tokens", param=param)
        if len(ids) > self.context_length:
            raise ContextLengthError(
                f"input {index} has {len(ids)} tokens, the model reads at most {self.context_length}: shorten it",
                param=param,
            )
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"input {index} has token id {wrong}, the model knows 0 to {self.vocab_size - 1}", param=param
            )

    def _batches(self, inputs: Sequence[Ids]) -> Iterator[tuple[int, int]]:
        """Ranges of inputs that fit one step, in order."""
        first = tokens = 0
        for index, ids in enumerate(inputs):
            if tokens + len(ids) > self._max_batch_tokens or index - first == self._max_sequences:
                yield first, index
                first, tokens = index, 0
            tokens += len(ids)
        if first < len(inputs):
            yield first, len(inputs)


def load_embedding_engine(
    model: Path | str | Checkpoint, options: EngineOptions | None = None, *, pooling: str = ""
) -> EmbeddingEngine:
    """Read and lower a model that makes embeddings.

    ``pooling`` ("mean", "cls" or "last") makes embeddings with a model that was made to generate text, or pools in
    another way than the model's files say. Raises UnsupportedModelError where neither names a pooling, ModelError for
    files that cannot be used.
    """
    from toque.backends import load_backend
    from toque.formats import load_checkpoint
    from toque.formats.checkpoint import Checkpoint
    from toque.graph.fuse import fuse
    from toque.models import build_graph

    options = options or EngineOptions()
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(Path(model))
    if options.quantize:
        from toque.formats.quantize import quantize_checkpoint

        checkpoint = quantize_checkpoint(checkpoint, options.quantize)
    config = checkpoint.config
    if not (pooling or config.pooling):
        raise UnsupportedModelError(
            f"{checkpoint.path.name}: {config.architecture} generates text; for embeddings use a model made for them "
            "(bert, or a sentence-transformers folder), or say how to pool its tokens",
            param="pooling",
        )
    context = context_length(config.context_length, options)
    config = replace(config, pooling=pooling or config.pooling, context_length=context)
    executable = load_backend(options.backend).lower(
        fuse(build_graph(config, checkpoint.tensors.keys())),
        checkpoint,
        BackendOptions(
            threads=options.threads,
            isa=options.isa,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
        ),
    )
    return EmbeddingEngine(
        executable,
        vocab_size=config.vocab_size,
        context_length=context,
        normalize=config.normalize_embeddings,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
    )


def _batch(inputs: Sequence[Ids]) -> StepBatch:
    """One step over whole texts, each in KV blocks of its own that the next step will write over."""
    lengths = np.array([len(ids) for ids in inputs], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    blocks = -(-lengths // BLOCK_SIZE)
    tables = np.zeros((len(inputs), int(blocks.max())), np.int32)
    next_block = 0
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = np.arange(next_block, next_block + count)
        next_block += int(count)
    nothing = np.full(len(inputs), -1, np.int32)
    return StepBatch(
        tokens=np.concatenate([np.asarray(ids, np.int32) for ids in inputs]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        starts=starts,
        context=lengths,
        block_tables=tables,
        rows=starts[1:] - 1,
        slots=np.zeros(len(inputs), np.int32),
        targets=nothing,
        top=nothing,
    )


def _normalized(vectors: Float32) -> Float32:
    lengths = np.sqrt(np.sum(np.square(vectors, dtype=np.float64), axis=1, keepdims=True))
    normed: Float32 = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return normed
