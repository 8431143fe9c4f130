"""Quality as numbers: perplexity of a text, and how far one run's predictions are from another's."""

from __future__ import annotations

import ast
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toque.backends.base import BLOCK_SIZE, BackendOptions, Executable, StepBatch
from toque.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint

CHUNK = 64  # tokens of a step: logits of so many rows exist at a time

# Modules of the standard library with much prose in them; a fixed list, so that a Python version means one text.
_DOCUMENTED = (
    "argparse", "calendar", "contextlib", "difflib", "functools", "heapq", "ipaddress", "optparse", "pickle",
    "random", "shutil", "statistics", "string", "tempfile", "textwrap", "threading", "zipfile",
)  # fmt: skip


def documentation() -> str:
    """Documentation strings of the standard library, about 100 kB of English: nothing has to be shipped."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for name in _DOCUMENTED:
        path = root / f"{name}.py"
        if not path.exists():
            path = root / name / "__init__.py"  # a module that became a package
        if path.exists():
            texts += _docstrings(ast.parse(path.read_text(encoding="utf-8")))
    return "\n\n".join(texts)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 200:
                yield text


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``kl`` is KL(reference || model) in nats, the mean over positions; ``top1`` how often both name one token."""

    tokens: int  # that were predicted
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None


def lower_for_evaluation(
    checkpoint: Checkpoint, backend: str, context: int, *, threads: int = 0, isa: str = ""
) -> Executable:
    """The model on a backend, with the cache of one sequence of ``context`` tokens."""
    from toque.backends import load_backend
    from toque.graph.fuse import fuse
    from toque.models import build_graph

    if checkpoint.config.pooling:
        raise UnsupportedModelError(f"{checkpoint.path.name} makes embeddings: it has no perplexity")
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    options = BackendOptions(threads=threads, isa=isa, max_batch_tokens=CHUNK, max_sequences=CHUNK)
    executable = load_backend(backend).lower(graph, checkpoint, options)
    executable.allocate_kv(-(-context // BLOCK_SIZE))
    return executable


def evaluate(
    model: Executable,
    tokens: Sequence[int],
    *,
    context: int,
    prefix: Sequence[int] = (),
    reference: Executable | None = None,
) -> Evaluation:
    """Predict every token of a text from those before it, in windows of ``context`` that do not overlap.

    ``prefix`` (a beginning-of-text token) opens each window. The first token of a window is not predicted unless
    there is a prefix. Raises ConfigError when there is nothing to predict.
    """
    if context <= len(prefix) + 1:
        raise ConfigError(f"context must be at least {len(prefix) + 2}, got {context}", param="context")
    size = context - len(prefix)
    windows = [[*prefix, *tokens[start : start + size]] for start in range(0, len(tokens), size)]
    losses = reference_losses = divergence = 0.0
    agreed = count = 0
    for window in windows:
        for start in range(0, len(window) - 1, CHUNK):
            # The last token of a window predicts nothing.
            part = window[start : min(start + CHUNK, len(window) - 1)]
            targets = np.asarray(window[start + 1 : start + 1 + len(part)])
            scored = np.arange(len(part)) + start + 1 >= len(prefix)
            ours = _log_softmax(model.logits(_batch(part, start)))[scored]
            losses -= float(ours[np.arange(len(ours)), targets[scored]].sum())
            count += len(ours)
            if reference is not None:
                theirs = _log_softmax(reference.logits(_batch(part, start)))[scored]
                reference_losses -= float(theirs[np.arange(len(theirs)), targets[scored]].sum())
                divergence += _divergence(theirs, ours)
                agreed += int((theirs.argmax(axis=1) == ours.argmax(axis=1)).sum())
    if not count:
        raise ConfigError("the text is too short: there is no token to predict", param="text")
    if reference is None:
        return Evaluation(count, _perplexity(losses, count))
    return Evaluation(
        count,
        _perplexity(losses, count),
        _perplexity(reference_losses, count),
        divergence / count,
        agreed / count,
    )


def _perplexity(losses: float, count: int) -> float:
    return math.exp(min(losses / count, 700.0)) if math.isfinite(losses) else math.inf


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def _divergence(theirs: npt.NDArray[Any], ours: npt.NDArray[Any]) -> float:
    """The sum over rows of sum p (log p - log q)."""
    return float((np.exp(theirs) * (theirs - ours)).sum())


def _batch(tokens: Sequence[int], first: int) -> StepBatch:
    """One sequence whose block i of the cache is its own block i; logits of every token."""
    n = len(tokens)
    last = first + n
    positions = np.arange(first, last, dtype=np.int32)
    blocks = np.arange(-(-last // BLOCK_SIZE), dtype=np.int32)
    nothing = np.full(n, -1, np.int32)
    return StepBatch(
        tokens=np.asarray(tokens, np.int32),
        positions=positions,
        starts=np.array([0, n], np.int32),
        context=np.array([last], np.int32),
        block_tables=blocks[None],
        rows=np.arange(n, dtype=np.int32),
        slots=np.zeros(n, np.int32),
        targets=nothing,
        top=nothing,
    )
