"""A model's step before there is a model: its own graph over zeros, no larger than it takes to know.

How fast a model decodes hangs on more than its bytes: on the shapes and types of its matrices, on how often threads
must meet, on attention. A step of its graph has all of that, and zeros take nearly as long as any other weights.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toque.backends.base import BLOCK_SIZE, BackendOptions, StepBatch
from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Checkpoint, TensorData
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.types import SamplingParams

if TYPE_CHECKING:
    from toque.backends.base import Backend
    from toque.engine.plan import MemoryPlan

ENOUGH = 256 << 20  # bytes of weights that a step reads: more than any cache here holds, and soon packed
SECONDS, REPEATS = 0.5, 12  # of steps to take the best of: so long, and so many rounds
MOST_SECONDS, FEWEST = 2.0, 2  # but no longer than this where they are slow, unless there were fewer rounds
# Activations of zeros have no values that tower over the others, which cost real ones a few percent.
ZEROS_SHARE = 0.96
_LAYER = re.compile(r"blk\.(\d+)\.")
_BY_TOKEN = frozenset(
    {"token_embd.weight", "output.weight", "output.bias"}
)  # a row for each of the vocabulary


def expected_seconds(
    checkpoint: Checkpoint,
    plan_of: Callable[[Checkpoint], MemoryPlan],
    backend: Backend,
    options: BackendOptions,
    contexts: Sequence[int],
) -> dict[int, float] | None:
    """Seconds of a step that decodes one sequence, by its context; None where the memory is not enough to try.

    As many layers are run as read `ENOUGH`, with their share of the vocabulary; a step of all takes longer by what it
    reads more.
    """
    whole, layers = plan_of(checkpoint), checkpoint.config.n_layers
    model = rehearsal(checkpoint, max(1, min(layers, math.ceil(layers * ENOUGH / whole.read_per_token))))
    tried = plan_of(model)
    if tried.available is not None and tried.weight_bytes + tried.workspace_bytes > tried.available:
        return None
    seconds = step_seconds(model, backend, options, contexts)

    def read(plan: MemoryPlan, context: int) -> int:
        return plan.read_per_token + context * plan.kv_per_token

    return {at: took / ZEROS_SHARE * read(whole, at) / read(tried, at) for at, took in seconds.items()}


def rehearsal(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The same model with its first ``layers`` layers only, and zeros for weights: nothing is read.

    Of the vocabulary there is as large a share as of the layers: a part of a model is a model of the same proportions,
    and one of a large model is small. Of experts there are as many as a token uses, so that each step reads what a
    token of the model reads.
    """
    config = checkpoint.config
    used = config.n_experts_used
    vocab = max(1, math.ceil(config.vocab_size * layers / config.n_layers))
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= layers:
            continue
        shape = tensor.shape
        if used and (len(shape) == 3 or name.endswith("ffn_gate_inp.weight")):
            shape = (used, *shape[1:])
        elif name in _BY_TOKEN:
            shape = (vocab, *shape[1:])
        row_bytes = BY_NAME[tensor.dtype].row_bytes(shape[-1])
        raw = np.zeros((math.prod(shape[:-1]), row_bytes), np.uint8)  # pages that nobody has written to
        tensors[name] = TensorData(name, tensor.dtype, shape, raw)
    config = replace(config, n_layers=layers, n_experts=used, vocab_size=vocab)
    return replace(checkpoint, config=config, tensors=tensors)


def step_seconds(
    model: Checkpoint, backend: Backend, options: BackendOptions, contexts: Sequence[int]
) -> dict[int, float]:
    """Seconds of a step that decodes one sequence, the best of many, by its context in tokens."""
    longest = max(contexts) + 1
    graph = fuse(build_graph(replace(model.config, context_length=longest), model.tensors.keys()))
    executable = backend.lower(graph, model, options)
    try:
        executable.allocate_kv(-(-longest // BLOCK_SIZE))
        executable.open_slot(0, SamplingParams(temperature=0), (), (), (), 0)
        best = dict.fromkeys(contexts, math.inf)
        begun, rounds, spent = time.perf_counter(), 0, 0.0
        while rounds < FEWEST or (spent < MOST_SECONDS and (rounds < REPEATS or spent < SECONDS)):
            rounds += 1
            for context in contexts:  # in turn: a busy neighbour slows all alike
                batch = _one_token(context, longest)
                start = time.perf_counter()
                executable.step(batch)
                best[context] = min(best[context], time.perf_counter() - start)
            spent = time.perf_counter() - begun
    finally:
        executable.close()
    return best


def _one_token(context: int, longest: int) -> StepBatch:
    return StepBatch(
        tokens=_ints(0),
        positions=_ints(context),
        starts=_ints(0, 1),
        context=_ints(context + 1),
        block_tables=_ints(*range(-(-longest // BLOCK_SIZE)))[None],
        rows=_ints(0),
        slots=_ints(0),
        targets=_ints(-1),
        top=_ints(-1),
    )


def _ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)
