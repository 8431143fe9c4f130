"""The paged KV cache: blocks for running sequences, and the prefixes that finished ones left behind."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from toque.backends.base import BLOCK_SIZE
from toque.engine.kv.pool import BlockPool
from toque.engine.kv.prefix import PrefixNames
from toque.errors import EngineError


class KVCache:
    """Hands out KV blocks and finds blocks that already hold a prompt's prefix.

    Only full blocks whose KV has been written are ever shared (`publish`). A published block that nobody holds stays
    findable until its room is needed; the least recently used goes first, and of one sequence the tail goes before the
    head, because a prefix without its head can never be found again.
    """

    __slots__ = ("_blocks", "_names", "_recent", "block_size", "names", "pool", "prefix_cache")

    def __init__(
        self, n_blocks: int, *, block_size: int = BLOCK_SIZE, prefix_cache: bool = True, identity: str = ""
    ) -> None:
        self.pool = BlockPool(n_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.names = PrefixNames(block_size, identity)
        self._blocks: dict[bytes, int] = {}  # name → the block that holds this content
        self._names: dict[int, bytes] = {}  # and back
        self._recent: OrderedDict[int, None] = OrderedDict()  # idle blocks, least recently used first

    @property
    def n_blocks(self) -> int:
        return self.pool.n_blocks

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and cached ones that nobody holds."""
        return self.pool.free + self.pool.idle

    @property
    def held(self) -> int:
        return self.pool.held

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of ``names``. Nothing is held yet: see `hold`."""
        found: list[int] = []
        if self.prefix_cache:
            blocks = self._blocks
            for name in names:
                block = blocks.get(name)
                if block is None:
                    break
                found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds: holding them makes them unavailable."""
        references = self.pool.references
        return sum(1 for block in blocks if references(block) == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.hold(block)
            self._recent.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks of unspecified content, each held once; all or none. Raises EngineError when short."""
        if count > self.available:
            raise EngineError(f"{count} KV blocks were asked for, {self.available} are available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if not self.pool.free:
            block, _ = self._recent.popitem(last=False)
            self._forget(block)
            self.pool.discard(block)
        return self.pool.take()

    def _forget(self, block: int) -> None:
        del self._blocks[self._names.pop(block)]

    def publish(self, block: int, name: bytes) -> None:
        """Make a full, written block findable; content that is already known under another block stays there."""
        if not self.prefix_cache or name in self._blocks or block in self._names:
            return
        self._blocks[name] = block
        self._names[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, given in the order of its tokens."""
        names, recent, drop = self._names, self._recent, self.pool.drop
        for block in reversed(blocks):
            keep = block in names
            if drop(block, keep=keep) and keep:
                recent[block] = None

    def clear(self) -> None:
        """Forget every prefix. Blocks that are held stay held, but can no longer be found."""
        for block in self._recent:
            self.pool.discard(block)
        self._recent.clear()
        self._blocks.clear()
        self._names.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises EngineError unless the books agree with what the ``holders`` (block lists of sequences) hold."""
        self.pool.check()
        expected = Counter(block for blocks in holders for block in blocks)
        for block in range(self.n_blocks):
            if self.pool.references(block) != expected[block]:
                raise EngineError(
                    f"KV block {block} has {self.pool.references(block)} references, sequences hold {expected[block]}"
                )
        if set(self._recent) - set(self._names) or len(self._recent) != self.pool.idle:
            raise EngineError("the list of evictable KV blocks disagrees with the pool")
        if {block: name for name, block in self._blocks.items()} != self._names:
            raise EngineError("the prefix index and its inverse disagree")
