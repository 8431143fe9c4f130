"""Which buffer holds which value of a graph, and when a buffer may be used again.

A value lives as float rows, as packed activations (what linear kernels read), or as both, depending on its readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from toque import _native
from toque.backends.cpu.weights import Reader
from toque.graph.ir import Graph, Value

LINEAR_OPS = frozenset({"linear", "gated_linear"})


class Uses:
    """Who reads each value as what, and when for the last time."""

    def __init__(self, graph: Graph) -> None:
        self._last: dict[int, int] = {}
        self._as_rows = {graph.output.id}
        for index, node in enumerate(graph.nodes):
            for position, value in enumerate(node.inputs):
                self._last[value.id] = index
                if node.op not in LINEAR_OPS or position > 0:  # a linear's second input is its residual
                    self._as_rows.add(value.id)
        self._last[graph.output.id] = len(graph.nodes)

    def as_rows(self, value: Value) -> bool:
        return value.id in self._as_rows

    def last(self, value: Value) -> int:
        """Index of its last reader; -1 when nobody reads it."""
        return self._last.get(value.id, -1)


@dataclass(slots=True)
class Place:
    """Where a value is. ``acts`` by what their readers have in common, see `BufferPool.sort`.

    ``per_row``: a row per wanted row, not per token.
    """

    per_row: bool
    rows: _native.Rows | None = None
    acts: dict[tuple[int, int], _native.ActBuffer] = field(default_factory=dict)
    give_back: list[Callable[[], None]] = field(default_factory=list)


class BufferPool:
    """Buffers of a native model, used again once nobody reads the value that they held.

    After an op without a barrier a quick worker may already be in the next op while a slow one still reads this op's
    inputs: such inputs become free only behind the next barrier.
    """

    def __init__(self, model: _native.Model) -> None:
        self._model = model
        self._rows: dict[tuple[int, bool], list[_native.Rows]] = defaultdict(list)
        self._acts: dict[tuple[int, int, bool, bool], list[_native.ActBuffer]] = defaultdict(list)
        self._waiting: list[Callable[[], None]] = []

    def rows(self, place: Place, width: int) -> _native.Rows:
        """The place's rows, taken from the pool at the first call."""
        if place.rows is None:
            free = self._rows[width, place.per_row]
            rows = place.rows = free.pop() if free else self._model.rows(width, place.per_row)
            place.give_back.append(lambda: free.append(rows))
        return place.rows

    def sort(self, reader: Reader) -> tuple[int, int]:
        """Readers of the same sort read the same packed activations: their kind, and the order of their values."""
        return self._model.act_kind(reader.matrix), reader.orders

    def act(self, place: Place, reader: Reader, *, per_worker: bool = False) -> _native.ActBuffer:
        """The place's packed activations of the sort that ``reader`` takes."""
        sort = self.sort(reader)
        if sort not in place.acts:
            free = self._acts[sort[0], reader.matrix.cols, place.per_row, per_worker]
            act = place.acts[sort] = (
                free.pop() if free else self._model.act(reader.matrix, place.per_row, per_worker)
            )
            place.give_back.append(lambda: free.append(act))
        return place.acts[sort]

    def release(self, place: Place) -> None:
        self._waiting += place.give_back
        place.give_back = []

    def barrier(self) -> None:
        for give_back in self._waiting:
            give_back()
        self._waiting.clear()
