"""Decides what each step computes. No clocks, no I/O, no arrays: times come from outside, a `StepPlan` goes out.

There are no prefill and decode phases. Every sequence has known and computed tokens; a step hands out a budget of
tokens until the two meet. Chunked prefill, prefix hits (computed starts above zero) and preemption (computed falls back
to zero) are all that one rule.

::

    add ──▶ waiting ──admit (slot + blocks for all known tokens)──▶ running ──finish──▶ gone
               ▲                                                      │
               └───────────── preempt: blocks and slot given back ────┘
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from toque.engine.budget import StepBudget
from toque.engine.kv.cache import KVCache
from toque.engine.queue import FairQueue, Tenant
from toque.engine.sequence import Sequence, SequenceState
from toque.errors import EngineError

_BY_KEY = attrgetter("key")
_ANSWER_TOKEN = 2.0  # prompt tokens that one of an answer counts for in a tenant's account
_MAX_SKIPPED = 64  # waiting sequences looked past in one step because their prefix is being computed


@dataclass(slots=True)
class StepPlan:
    """One step: ``decodes`` get their newest token computed and their drafts, ``chunks`` the next n tokens of each.

    Before it runs, sampler slots in ``closed`` are closed, then those of ``admitted`` opened; ``grown`` sequences were
    given more blocks at the end of their list. ``drafted`` is the number of all drafted tokens.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)
    preempted: int = 0
    drafted: int = 0
    victims: list[Sequence] = field(default_factory=list)  # those that were preempted

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def prefill_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


class Scheduler:
    """Owns every sequence's state, KV blocks and sampler slot.

    Guarantees: the first running sequence (priority, then arrival) is never preempted, so at least one request always
    advances; what was admitted can always be completed, alone if need be; a sequence that ends gives everything back
    at once.
    """

    def __init__(
        self,
        kv: KVCache,
        budget: StepBudget,
        *,
        max_sequences: int,
        max_rows: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.kv = kv
        self.budget = budget
        # Each running sequence needs at least one token of the budget and one row of logits.
        self.max_rows = max_rows if max_rows is not None else max_sequences
        self.max_sequences = min(max_sequences, budget.max_tokens, self.max_rows)
        self.waiting = FairQueue(weights, credit=budget.max_tokens)
        self.running: list[Sequence] = []  # in order of (priority, arrival)
        self._slots = list(range(self.max_sequences - 1, -1, -1))
        self._filling: dict[bytes, Sequence] = {}  # prefix blocks that are being computed, and by whom
        self._paused = False  # streams paused in the last step
        self.preemptions = 0
        self.prefix_hits = 0
        self.prefix_queries = 0

    def add(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is. Its sampler slot stays the caller's to close."""
        if sequence.state == SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state == SequenceState.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.state != SequenceState.PREPARING:
            raise EngineError(f"request {sequence.id} was finished twice")
        sequence.state = SequenceState.FINISHED
        self.waiting.leave(sequence.tenant)

    def plan(self) -> StepPlan:
        """The next step. It is empty only when nothing waits or runs."""
        plan = StepPlan()
        may_pause, self._paused = not self._paused, False
        behind = self._plan_decodes(plan)
        if behind or len(self.waiting):
            self._plan_prefill(plan, behind, may_pause)
        if self.waiting.contended:
            for sequence in plan.decodes:
                sequence.tenant.served += _ANSWER_TOKEN * sequence.tenant.per_token
        elif plan.decodes:  # all are one tenant's
            tenant = plan.decodes[0].tenant
            tenant.served += _ANSWER_TOKEN * tenant.per_token * len(plan.decodes)
        self.preemptions += plan.preempted
        return plan

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """The plan took so long."""
        self.budget.observe(len(plan.decodes) + plan.drafted, plan.prefill_tokens, seconds)

    def spare(self, plan: StepPlan) -> int:
        """Drafted tokens that a step has room for beside its sure work: of its tokens and of its rows."""
        rows = sum(_rows(sequence, count) for sequence, count in plan.chunks)
        left = min(self.budget.max_tokens - plan.prefill_tokens, self.max_rows - rows)
        return left - len(plan.decodes) - plan.drafted

    def room_for(self, sequence: Sequence, drafted: int, plan: StepPlan) -> int:
        """How many of so many drafted tokens a decoding sequence has room for, taking blocks that nobody misses."""
        kv = self.kv
        missing = kv.blocks_for(sequence.computed + 1 + drafted) - len(sequence.blocks)
        # Every running sequence may need a block in a moment, and none is preempted for a guess.
        missing = min(missing, kv.available - len(self.running))
        if missing > 0:
            sequence.blocks += kv.allocate(missing)
            sequence.room += missing * kv.block_size
            plan.grown.append(sequence)
        drafted = min(drafted, sequence.room - sequence.computed - 1)
        sequence.tenant.served += drafted * sequence.tenant.per_token
        return drafted

    def publish(self, sequence: Sequence) -> None:
        """Offer the sequence's newly completed blocks to the prefix cache. Call after its computed count grew."""
        if not self.kv.prefix_cache:
            return
        full = sequence.computed // self.kv.block_size
        if full > sequence.published:
            names = sequence.names
            if len(names) < full:
                self.kv.names.extend(names, sequence.root, sequence.tokens, full)
            for index in range(sequence.published, full):
                name = names[index]
                self.kv.publish(sequence.blocks[index], name)
                if self._filling.get(name) is sequence:
                    del self._filling[name]
            sequence.published = full

    # --- decodes ------------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Everything that decodes gets its token; returns the running sequences that are further behind."""
        decodes, behind = plan.decodes, []
        # Victims are taken from the end of this list, never before the sequence that is being visited.
        for sequence in self.running:
            if sequence.decoding:
                if sequence.computed == sequence.room and not self._grow(sequence, plan):
                    break
                decodes.append(sequence)
            else:
                behind.append(sequence)
        return behind

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """One more block, preempting the last in line while there is none; False when that was itself."""
        kv = self.kv
        while not kv.available:
            victim = self.running[-1]
            if victim is self.running[0]:
                raise EngineError(f"request {sequence.id} outgrew the whole KV cache of {kv.n_blocks} blocks")
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.blocks += kv.allocate(1)
        sequence.room += kv.block_size
        plan.grown.append(sequence)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Back to the queue, its tokens known but not computed. Its full blocks stay cached while there is room."""
        self.running.remove(victim)
        plan.closed.append(victim.slot)
        self._give_back(victim)
        victim.state = SequenceState.WAITING
        victim.decoding = False
        victim.computed = 0
        self.waiting.push(victim, front=True)
        plan.preempted += 1
        plan.victims.append(victim)

    def _give_back(self, sequence: Sequence) -> None:
        self.kv.release(sequence.blocks)
        sequence.blocks = []
        sequence.room = 0
        if not sequence.decoding:
            for name in sequence.names[sequence.published :]:
                if self._filling.get(name) is sequence:
                    del self._filling[name]
        sequence.published = 0
        self._slots.append(sequence.slot)
        sequence.slot = -1

    # --- prefill ------------------------------------------------------------------------------------------------

    def _plan_prefill(self, plan: StepPlan, behind: list[Sequence], may_pause: bool) -> None:
        """Hand out the rest of the budget in the order of priority, fair share, arrival."""
        if not self._slots and len(self.waiting):
            # Every place is taken, perhaps every row and token of the step too: the most important goes first.
            if self.waiting.best_priority() < self.running[-1].priority:
                self._push_out(self.running[-1], plan, behind)
            elif (first := self.waiting.first()) is not None and (surplus := self._surplus(first)):
                self._push_out(surplus[0], plan, behind)
        budget = self.budget.prefill_tokens(len(plan.decodes))
        rows = self.max_rows - len(plan.decodes)
        skipped: list[Sequence] = []
        blocked = False  # the first in the queue does not fit: nothing overtakes it
        pausing: set[Tenant] = set()
        while budget > 0 and rows > 0:
            sequence = min(behind, key=_turn) if behind else None
            if not blocked:
                waiting = self.waiting.first()
                if waiting is not None and (sequence is None or _turn(waiting) < _turn(sequence)):
                    if waiting.tenant in pausing:
                        break
                    if self._must_wait_for_prefix(waiting) and len(skipped) < _MAX_SKIPPED:
                        self.waiting.remove(waiting)
                        skipped.append(waiting)
                        continue
                    decodes = len(plan.decodes)
                    if not self._admit(waiting, plan, behind):
                        blocked = True
                        continue
                    rows += decodes - len(plan.decodes)
                    sequence = waiting
                    behind.append(sequence)
            if sequence is None or sequence.tenant in pausing:
                break
            if may_pause and not plan.chunks and (pausing := self._pause_for(sequence, plan)):
                self._paused = True
                budget = self.budget.prefill_tokens(len(plan.decodes))
                rows = self.max_rows - len(plan.decodes)
            behind.remove(sequence)
            count = min(budget, len(sequence.tokens) - sequence.computed)
            if sequence.unscored:
                # Every prompt position that is still to be scored takes a row of logits.
                free = max(sequence.scored - sequence.computed, 0)
                count = min(count, free + rows)
                rows -= max(count - free, 1)
            else:
                rows -= 1
            budget -= count
            sequence.tenant.served += count * sequence.tenant.per_token
            plan.chunks.append((sequence, count))
        for sequence in reversed(skipped):
            self.waiting.push(sequence, front=True)

    def _pause_for(self, sequence: Sequence, plan: StepPlan) -> set[Tenant]:
        """Take out the decodes of tenants that have more than the share of ``sequence``'s; returns those tenants.

        They hold more places for their weight and were served more, so the step belongs to the prompt of the other:
        neither the time of their tokens nor the step target, which is there for their sake, makes it wait. Their
        streams never pause for two steps in a row, and for no more tokens than the other is behind (`Tenant.served`).
        """
        if not self.waiting.contended or not plan.decodes:
            return set()
        tenant = sequence.tenant
        running = Counter(other.tenant for other in self.running)
        share = running[tenant] * tenant.per_token
        pausing = {
            owner
            for owner, places in running.items()
            if places * owner.per_token > share and owner.served > tenant.served
        }
        decodes = [d for d in plan.decodes if d.tenant not in pausing or d.priority < sequence.priority]
        if len(decodes) == len(plan.decodes):
            return set()
        plan.decodes = decodes
        return pausing

    def _must_wait_for_prefix(self, sequence: Sequence) -> bool:
        """Somebody no less important is computing exactly the block this one needs next: in a moment it is a hit."""
        if not self._filling:
            return False
        names = self._reusable_names(sequence)
        cached = len(self.kv.match(names))
        owner = self._filling.get(names[cached]) if cached < len(names) else None
        return owner is not None and owner.priority <= sequence.priority

    def _reusable_names(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that may come from the cache: full ones, before the last known token."""
        if not self.kv.prefix_cache:
            return []
        known = len(sequence.tokens)
        # A scoring request samples nothing, so even its last known token may be cached once it has been scored.
        limit = min(known - 1, sequence.scored) // self.kv.block_size
        if len(sequence.names) < limit:
            self.kv.names.extend(sequence.names, sequence.root, sequence.tokens, limit)
        return sequence.names[:limit]

    def _admit(self, sequence: Sequence, plan: StepPlan, behind: list[Sequence]) -> bool:
        """Give it a slot and blocks for all its known tokens, preempting less important or surplus ones if need be."""
        kv = self.kv
        if not self._slots and self.running[-1].priority <= sequence.priority:
            return False
        names = self._reusable_names(sequence)
        cached = kv.match(names)
        total = kv.blocks_for(len(sequence.tokens))
        while True:
            # Running sequences will soon need a block each: starting one only to preempt it again helps nobody.
            headroom = len(self.running)
            needed = total - len(cached) + kv.idle_among(cached) + headroom
            if self._slots and needed <= kv.available:
                break
            if not self._make_room(sequence, needed, plan, behind):
                return False
        kv.hold(cached)
        sequence.blocks = cached + kv.allocate(total - len(cached))
        sequence.room = total * kv.block_size
        sequence.computed = len(cached) * kv.block_size
        sequence.published = len(cached)
        self.waiting.remove(sequence)
        sequence.slot = self._slots.pop()
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_BY_KEY)
        for name in names[len(cached) :]:
            self._filling.setdefault(name, sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
            self.prefix_hits += sequence.computed
            self.prefix_queries += len(sequence.prompt)
        plan.admitted.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, needed: int, plan: StepPlan, behind: list[Sequence]) -> bool:
        """Preempt one that matters less than ``sequence``, or is its tenant's surplus, if all such free enough."""
        lesser = [other for other in self.running if other.priority > sequence.priority]
        if not lesser:
            lesser = self._surplus(sequence)[::-1]
        planned = {chunk[0] for chunk in plan.chunks}
        if not lesser or any(other in planned for other in lesser):
            return False
        if needed - len(lesser) > self.kv.available + sum(len(other.blocks) for other in lesser):
            return False
        self._push_out(lesser[-1], plan, behind)
        return True

    def _surplus(self, sequence: Sequence) -> list[Sequence]:
        """What other tenants run beyond their share while ``sequence`` waits, the first to preempt first.

        A tenant gives a place to another that, even with it, runs no more for its weight. So no place ever goes back
        and forth, and who comes to an engine that one tenant has filled does not wait for an answer to end.
        """
        if not self.waiting.contended:
            return []
        tenant = sequence.tenant
        running = Counter(other.tenant for other in self.running)
        share = (running[tenant] + 1) * tenant.per_token
        surplus = []
        for other in reversed(self.running):
            owner = other.tenant
            if owner is tenant or other.priority < sequence.priority:
                continue
            if (running[owner] - 1) * owner.per_token >= share:
                running[owner] -= 1
                surplus.append(other)
        return surplus

    def _push_out(self, victim: Sequence, plan: StepPlan, behind: list[Sequence]) -> None:
        """Preempt a sequence that may already have its place in this step's decodes."""
        if victim.decoding:
            if victim in plan.decodes:  # else its tenant's streams pause
                plan.decodes.remove(victim)
            if victim in plan.grown:
                plan.grown.remove(victim)
        else:
            behind.remove(victim)
        self._preempt(victim, plan)

    # --- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises EngineError unless every block, slot and sequence is accounted for. Cheap enough for idle moments."""
        self.kv.check(sequence.blocks for sequence in self.running)
        slots = sorted([sequence.slot for sequence in self.running] + self._slots)
        if slots != list(range(self.max_sequences)):
            raise EngineError(f"sampler slots are lost or doubled: {slots}")
        if [s.key for s in self.running] != sorted(s.key for s in self.running):
            raise EngineError("the running sequences are out of order")
        for sequence in self.running:
            if sequence.state != SequenceState.RUNNING or sequence.computed > sequence.room:
                raise EngineError(
                    f"request {sequence.id} computed {sequence.computed} of {sequence.room} tokens of room"
                )
        if any(owner.state != SequenceState.RUNNING for owner in self._filling.values()):
            raise EngineError("a prefix is waited for that nobody computes")


def _rows(sequence: Sequence, count: int) -> int:
    """Rows of logits that the next ``count`` tokens of a sequence that is behind take."""
    if not sequence.unscored:
        return 1
    return max(count - max(sequence.scored - sequence.computed, 0), 1)


def _turn(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.priority, sequence.tenant.served, sequence.arrival
