"""The KV blocks of one device: who holds which, and which are free."""

from __future__ import annotations

from toque.errors import EngineError


class BlockPool:
    """Reference-counted blocks, numbered from 0.

    A block is *free*, *held* (one reference or more) or *idle*: nobody holds it, but its owner asked to keep what is in
    it. Every transition is checked, so a block can never be freed twice or held while it is free.
    """

    __slots__ = ("_free", "_idle", "_references", "n_blocks")

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise EngineError(f"a KV pool needs at least one block, got {n_blocks}")
        self.n_blocks = n_blocks
        self._references = [0] * n_blocks
        self._free = list(
            range(n_blocks - 1, -1, -1)
        )  # a stack: low numbers first, recently used ones stay warm
        self._idle: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def held(self) -> int:
        return self.n_blocks - len(self._free) - len(self._idle)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self) -> int:
        """A free block, now held once. Raises EngineError when there is none: callers look at ``free`` first."""
        if not self._free:
            raise EngineError(f"the KV pool of {self.n_blocks} blocks has no free block")
        block = self._free.pop()
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference to a held or idle block."""
        if self._references[block] == 0:
            if block not in self._idle:
                raise EngineError(f"KV block {block} is free and cannot be shared")
            self._idle.remove(block)
        self._references[block] += 1

    def drop(self, block: int, *, keep: bool) -> bool:
        """One reference less; True when it was the last. Then the block is idle if ``keep``, else free."""
        references = self._references[block] - 1
        if references < 0:
            raise EngineError(f"KV block {block} was released more often than it was held")
        self._references[block] = references
        if references:
            return False
        if keep:
            self._idle.add(block)
        else:
            self._free.append(block)
        return True

    def discard(self, block: int) -> None:
        """An idle block becomes free; what was in it is forgotten."""
        if block not in self._idle:
            raise EngineError(f"KV block {block} is not idle and cannot be discarded")
        self._idle.remove(block)
        self._free.append(block)

    def check(self) -> None:
        """Raises EngineError unless free + idle + held is the whole pool, each block in exactly one of them."""
        free = set(self._free)
        held = {block for block, references in enumerate(self._references) if references > 0}
        if len(free) != len(self._free):
            raise EngineError("a KV block is in the free list twice")
        if free & self._idle or free & held or held & self._idle:
            raise EngineError("a KV block is free, idle or held at the same time")
        if len(free) + len(self._idle) + len(held) != self.n_blocks:
            raise EngineError(
                f"KV blocks were lost: {len(free)} free + {len(self._idle)} idle + {len(held)} held"
                f" is not {self.n_blocks}"
            )
        if any(references < 0 for references in self._references):
            raise EngineError("a KV block has a negative reference count")
