"""A model on the native kernels: one call per step, everything inside it without the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from toque import _native
from toque.backends.base import BackendOptions, Float32, StepBatch, StepResult
from toque.backends.cpu.lower import Lowering, matrices
from toque.backends.cpu.machine import usable_cpus
from toque.backends.cpu.weights import PackedWeights
from toque.errors import ConfigError, EngineError
from toque.graph.ir import Graph
from toque.graph.shapes import check_shapes
from toque.types import SamplingParams

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint


class CpuBackend:
    """Packed weights, int8 activations and paged attention over a 16-bit or int8 cache; see native/src."""

    name = "cpu"

    def lower(self, graph: Graph, checkpoint: Checkpoint, options: BackendOptions) -> CpuExecutable:
        if options.kv_dtype not in ("auto", "bf16", "int8"):
            raise ConfigError(
                f"kv_dtype must be auto, bf16 or int8 on the cpu backend, got {options.kv_dtype!r}",
                param="kv_dtype",
            )
        try:
            isa = _native.resolve_isa(options.isa)
        except ValueError as error:
            raise ConfigError(str(error), param="isa") from None
        check_shapes(graph, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
        threads = options.threads or usable_cpus()
        weights = PackedWeights(checkpoint.tensors, matrices(graph), threads)
        tables: dict[str, list[int]] = {"tokens": [], "positions": [], "first": []}
        for node in graph.nodes:
            if node.op == "embed":
                tables[node.attrs["ids"]].append(weights.matrix(node.weights[0]).rows)
        model = _native.Model(
            threads=threads,
            isa=isa,
            max_tokens=options.max_batch_tokens,
            max_rows=options.max_sequences,
            max_sequences=options.max_sequences,
            vocab_limit=min(tables["tokens"], default=2**31 - 1),
        )
        model.position_limit = min(tables["positions"], default=2**31 - 1)
        Lowering(graph, weights, model, options).run()
        return CpuExecutable(graph.output.width, model, weights)


class CpuExecutable:
    """See `toque.backends.base.Executable`.

    A batch with an index out of range, a closed slot or a foreign block raises `EngineError` before anything is
    computed or written.
    """

    def __init__(self, vocab_size: int, model: _native.Model, weights: PackedWeights) -> None:
        self.vocab_size = vocab_size
        self.kv_bytes_per_block = model.kv_bytes_per_block
        self._model: _native.Model | None = model
        self._weights: PackedWeights | None = weights  # what the native model points into

    @property
    def model(self) -> _native.Model:
        if self._model is None:
            raise EngineError("the executable is closed")
        return self._model

    def allocate_kv(self, n_blocks: int) -> None:
        self.model.allocate_kv(n_blocks)

    def open_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None:
        try:
            self.model.open_slot(
                slot,
                greedy=params.greedy,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                seed=(params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF,
                logit_bias=list(params.logit_bias),
                suppress=list(suppress),
                suppress_until=suppress_until,
                prompt=np.asarray(prompt, np.int32),
                output=np.asarray(output, np.int32),
            )
        except IndexError as error:
            raise EngineError(str(error)) from None

    def close_slot(self, slot: int) -> None:
        try:
            self.model.close_slot(slot)
        except IndexError as error:
            raise EngineError(str(error)) from None

    def step(self, batch: StepBatch) -> StepResult:
        try:
            return StepResult(
                *self.model.step(
                    batch.tokens,
                    batch.positions,
                    batch.starts,
                    batch.context,
                    batch.block_tables,
                    batch.rows,
                    batch.slots,
                    batch.targets,
                    batch.top,
                    batch.masks,
                )
            )
        except ValueError as error:
            raise EngineError(str(error)) from None

    def logits(self, batch: StepBatch) -> Float32:
        try:
            return self.model.logits(
                batch.tokens, batch.positions, batch.starts, batch.context, batch.block_tables, batch.rows
            )
        except ValueError as error:
            raise EngineError(str(error)) from None

    def close(self) -> None:
        self._model = None
        self._weights = None
