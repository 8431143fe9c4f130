"""A model's step before there is a model: its own graph over zeros, with no more layers than it takes to know.

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
SECONDS, REPEATS = 0.5, 12  # of steps to take the best of: so long, and so many
# Activations of zeros have no values that tower over the others, which cost real ones a few percent.
ZEROS_SHARE = 0.96
_LAYER = re.compile(r"blk\.(\d+)\.")


def expected_seconds(
    checkpoint: Checkpoint,
    plan_of: Callable[[Checkpoint], MemoryPlan],
    backend: Backend,
    options: BackendOptions,
    contexts: Sequence[int],
) -> dict[int, float] | None:
    """Seconds of a step that decodes one sequence, by its context; None where the memory is not enough to try.

    As many layers are run as read `ENOUGH`; a step of all takes longer by what it reads more.
    """
    whole, one = plan_of(checkpoint), plan_of(rehearsal(checkpoint, 1))
    layers = checkpoint.config.n_layers
    if layers > 1 and whole.read_per_token > ENOUGH:
        of_layer = (whole.read_per_token - one.read_per_token) / (layers - 1)
        layers = min(layers, 1 + math.ceil(max(ENOUGH - one.read_per_token, 0) / max(of_layer, 1)))
    model = rehearsal(checkpoint, layers)
    tried = plan_of(model)
    if tried.available is not None and tried.weight_bytes + tried.workspace_bytes > tried.available:
        return None
    seconds = step_seconds(model, backend, options, contexts)

    def read(plan: MemoryPlan, context: int) -> int:
        return plan.read_per_token + context * plan.kv_per_token

    return {at: took / ZEROS_SHARE * read(whole, at) / read(tried, at) for at, took in seconds.items()}


def rehearsal(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The same model with its first ``layers`` layers only, and zeros for weights: nothing is read.

    Of experts there are as many as a token uses, so that each step reads what a token of the model reads.
    """
    config = checkpoint.config
    used = config.n_experts_used
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= layers:
            continue
        shape = tensor.shape
        if used and (len(shape) == 3 or name.endswith("ffn_gate_inp.weight")):
            shape = (used, *shape[1:])
        row_bytes = BY_NAME[tensor.dtype].row_bytes(shape[-1])
        raw = np.zeros((math.prod(shape[:-1]), row_bytes), np.uint8)  # pages that nobody has written to
        tensors[name] = TensorData(name, tensor.dtype, shape, raw)
    return replace(checkpoint, config=replace(config, n_layers=layers, n_experts=used), tensors=tensors)


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
        begun, rounds = time.perf_counter(), 0
        while rounds < REPEATS or time.perf_counter() - begun < SECONDS:
            rounds += 1
            for context in contexts:  # in turn: a busy neighbour slows all alike
                batch = _one_token(context, longest)
                start = time.perf_counter()
                executable.step(batch)
                best[context] = min(best[context], time.perf_counter() - start)
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
