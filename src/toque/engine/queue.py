"""Requests that wait for a place in the running batch, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from toque.engine.sequence import Sequence

_REMEMBERED = 1024  # accounts of absent tenants, at most about this many


class Tenant:
    """A tenant's account: the tokens it was served, divided by its weight (a virtual token counter).

    A token of an answer counts as two of a prompt: it takes about that much more of a step's time, at least (Sheng et
    al., Fairness in Serving Large Language Models, 2024). The tenant that was served least goes next. ``live`` counts
    its waiting and running sequences.
    """

    __slots__ = ("live", "name", "per_token", "served")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.per_token = 1.0 / weight
        self.served = 0.0
        self.live = 0


class FairQueue:
    """Waiting sequences in the order: priority (low first), tenant served least, arrival.

    A tenant that was away starts at the account of the least served tenant that is active, less ``credit`` tokens:
    it is not owed the time it did not ask for, but what it asks now and then comes before what others ask all the
    time. Adding and removing are O(1); finding the next is linear in the waiting tenants.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, credit: float = 0.0) -> None:
        self._credit = credit
        self._weights = dict(weights or {})
        self._levels: dict[int, dict[str, OrderedDict[int, Sequence]]] = {}
        self._tenants: dict[str, Tenant] = {}
        self._active = 0
        self._length = 0
        self.tokens = 0  # known tokens of everything that waits

    def __len__(self) -> int:
        return self._length

    @property
    def contended(self) -> bool:
        """More than one tenant has work: only then does it matter who was served how much."""
        return self._active > 1

    def join(self, name: str) -> Tenant:
        """The account to charge for a new sequence of this tenant; `leave` when the sequence is over."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        if tenant.live == 0:
            others = [other.served for other in self._tenants.values() if other.live]
            if others:
                tenant.served = max(tenant.served, min(others) - self._credit * tenant.per_token)
            self._active += 1
        tenant.live += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.live -= 1
        if tenant.live == 0:
            self._active -= 1
            if self._active == 0:
                self._tenants.clear()  # nobody is left to compare with
            elif len(self._tenants) > 2 * self._active + _REMEMBERED:
                self._tenants = {name: other for name, other in self._tenants.items() if other.live}

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Queue a sequence behind its tenant's others, or before them when it has waited already."""
        level = self._levels.setdefault(sequence.priority, {})
        name = sequence.tenant.name
        line = level.get(name)
        if line is None:
            line = level[name] = OrderedDict()
        line[sequence.arrival] = sequence
        if front:
            line.move_to_end(sequence.arrival, last=False)
        self._length += 1
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        level = self._levels[sequence.priority]
        name = sequence.tenant.name
        line = level[name]
        del line[sequence.arrival]
        if not line:
            del level[name]
            if not level:
                del self._levels[sequence.priority]
        self._length -= 1
        self.tokens -= len(sequence.tokens)

    def best_priority(self) -> int:
        """The lowest priority number that waits. The queue must not be empty."""
        return min(self._levels)

    def first(self) -> Sequence | None:
        """Whose turn it is; it stays in the queue."""
        if not self._length:
            return None
        lines = self._levels[min(self._levels)].values()
        heads = (next(iter(line.values())) for line in lines)
        return min(heads, key=_turn)

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels.values():
            for line in level.values():
                yield from line.values()


def _turn(sequence: Sequence) -> tuple[float, int]:
    return sequence.tenant.served, sequence.arrival
