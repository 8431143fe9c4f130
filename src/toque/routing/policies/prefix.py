"""The replica that has the longest part of the prompt in its prefix cache, unless it is overloaded.

What a replica has cached is not asked but remembered: what was sent to it, as a chain of hashes in which each stands
for all tokens up to its block (as engines name their cached blocks). One table holds, for each hash, the set of
replicas as the bits of an integer::

    hash(tokens 0..63)   -> {a, b}
    hash(tokens 0..127)  -> {a}          a prompt that begins with these 128 tokens goes to a

The table is bounded and forgets what was used longest ago, much as the caches themselves do; a wrong memory costs
time, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from toque.routing.policies.base import Candidate, Key
from toque.routing.policies.least_load import least_loaded
from toque.types import EngineRequest

BLOCK = 64  # tokens
# Where prompts are looked at: every block at first, where conversations part, then every fourth. Replicas that share
# 4,096 tokens with a prompt are equally good.
_ENDS = (*range(BLOCK, 513, BLOCK), *range(768, 4097, 4 * BLOCK))
MAX_HASHES = 1 << 16
_MANY_BITS = 512  # of replicas that came and went, before their bits are taken out


class PrefixAffinity:
    """A replica is overloaded when it has more than ``2 x`` what the least loaded one has, and ``slack`` more."""

    def __init__(self, *, slack: int = 4, max_hashes: int = MAX_HASHES) -> None:
        self._slack = slack
        self._max_hashes = max_hashes
        self._holders: OrderedDict[int, int] = OrderedDict()  # hash to the bits of replicas, by last use
        self._bits: dict[Key, int] = {}
        self._next = 0
        self._seen: Sequence[Candidate] = ()  # whose bits `_marks` are, in their order
        self._marks: list[int] = []

    def choose(self, request: EngineRequest, candidates: Sequence[Candidate]) -> int:
        chain = chain_of(request)
        best = least_loaded(candidates)
        bound = 2 * candidates[best].load.weight[0] + self._slack
        index = self._nearest(chain, candidates, bound)
        if index is None:
            index = best
        self._remember(chain, candidates[index].key)
        return index

    def forget(self, key: Key) -> None:
        self._bits.pop(key, None)
        if self._next > _MANY_BITS and self._next > 2 * len(self._bits):
            self._renumber()

    def _nearest(self, chain: Sequence[int], candidates: Sequence[Candidate], bound: int) -> int | None:
        """The least loaded of those that share most and are not overloaded; None where none shares anything."""
        holders = self._holders
        if candidates is not self._seen:  # the same list comes again until something changes
            self._seen = candidates
            self._marks = [self._bits.get(candidate.key, 0) for candidate in candidates]
        matched = [held for link in chain if (held := holders.get(link))]
        looked_at = 0
        for held in reversed(matched):
            fresh = held & ~looked_at
            if not fresh:
                continue
            looked_at |= fresh
            nearest: int | None = None
            for index, mark in enumerate(self._marks):
                if not mark & fresh or candidates[index].load.weight[0] > bound:
                    continue
                if nearest is None or candidates[index].load.weight < candidates[nearest].load.weight:
                    nearest = index
            if nearest is not None:
                return nearest
        return None

    def _remember(self, chain: Sequence[int], key: Key) -> None:
        bit = self._bits.get(key)
        if bit is None:
            bit = self._bits[key] = 1 << self._next
            self._next += 1
            self._seen = ()
        holders = self._holders
        for link in chain:
            holders[link] = holders.get(link, 0) | bit
            holders.move_to_end(link)
        while len(holders) > self._max_hashes:
            holders.popitem(last=False)

    def _renumber(self) -> None:
        old, self._bits = self._bits, {}
        self._seen = ()
        for number, key in enumerate(old):
            self._bits[key] = 1 << number
        self._next = len(old)
        moved: OrderedDict[int, int] = OrderedDict()
        for link, held in self._holders.items():
            bits = 0
            for key, bit in old.items():
                if held & bit:
                    bits |= self._bits[key]
            if bits:
                moved[link] = bits
        self._holders = moved


def chain_of(request: EngineRequest) -> list[int]:
    """A hash for each end that the prompt reaches, of all tokens before it. Tenants and salts share nothing."""
    prompt = request.prompt
    length = len(prompt)
    link = hash((request.tenant, request.cache_salt))
    chain, begin = [], 0
    for end in _ENDS:
        if end > length:
            break
        link = hash((link, prompt[begin:end]))
        chain.append(link)
        begin = end
    return chain
