"""The scheduler's decisions, without an executable: plans are applied as if every step succeeded."""

from __future__ import annotations

import pytest

from toque.engine.budget import StepBudget
from toque.engine.kv.cache import KVCache
from toque.engine.scheduler import Scheduler, StepPlan
from toque.engine.sequence import Sequence, SequenceState
from toque.errors import EngineError
from toque.types import EngineRequest, SamplingParams

SIZE = 4


class Desk:
    """A scheduler with a batch budget in tokens, and a model that answers 1 to everything."""

    def __init__(
        self, blocks: int = 64, *, max_tokens: int = 32, max_sequences: int = 8, max_rows: int | None = None,
        prefix_cache: bool = True, target_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.kv = KVCache(blocks, block_size=SIZE, prefix_cache=prefix_cache)
        self.budget = StepBudget(target_s, max_tokens)
        self.scheduler = Scheduler(self.kv, self.budget, max_sequences=max_sequences, max_rows=max_rows)
        self.arrivals = 0
        self.seconds = 0.0

    def add(
        self,
        prompt: int | list[int],
        new: int = 4,
        *,
        tenant: str = "",
        priority: int = 0,
        scored: bool = False,
    ) -> Sequence:
        self.arrivals += 1
        # Prompts of different requests share nothing unless the test says so.
        tokens = [self.arrivals] * prompt if isinstance(prompt, int) else prompt
        sampling = SamplingParams(prompt_logprobs=0 if scored else None)
        request = EngineRequest(f"{self.arrivals}", tuple(tokens), sampling, tenant=tenant, priority=priority)
        sequence = Sequence(
            request,
            sampling,
            arrival=self.arrivals,
            tenant=self.scheduler.waiting.join(tenant),
            root=self.kv.names.root(tenant, ""),
            end=len(tokens) + new,
            scoring=False,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for sequence, count in [*((s, 1) for s in plan.decodes), *plan.chunks]:
            assert sequence.state == SequenceState.RUNNING
            begin = sequence.computed
            assert begin + count <= min(len(sequence.tokens), sequence.room)
            sequence.computed += count
            if sequence.prompt_logprobs is not None:
                done = min(sequence.computed + 1, len(sequence.prompt))
                sequence.prompt_logprobs += [None] * (done - len(sequence.prompt_logprobs))
            self.scheduler.publish(sequence)
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(1)
                sequence.decoding = True
                if len(sequence.tokens) >= sequence.end:
                    self.scheduler.finish(sequence)
        self.scheduler.check()
        return plan

    def run(self) -> int:
        steps = 0
        while self.scheduler.running or len(self.scheduler.waiting):
            self.step()
            steps += 1
            assert steps < 2000
        assert self.kv.held == 0
        return steps


def chunks(plan: StepPlan) -> dict[str, int]:
    return {sequence.id: count for sequence, count in plan.chunks}


def test_a_prompt_is_computed_in_chunks_beside_running_streams() -> None:
    desk = Desk(max_tokens=8)
    stream = desk.add(3, new=20)
    desk.step()
    desk.add(20)
    plans = [desk.step() for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [{"2": 7}, {"2": 7}, {"2": 6}]
    assert all(plan.decodes == [stream] for plan in plans)


def test_several_prompts_share_a_step() -> None:
    desk = Desk(max_tokens=16)
    for length in (5, 6, 9):
        desk.add(length)
    assert chunks(desk.step()) == {"1": 5, "2": 6, "3": 5}


def test_a_step_stays_near_the_target_while_a_long_prompt_is_read() -> None:
    desk = Desk(2000, max_tokens=512, target_s=0.050)

    def cost(plan: StepPlan) -> float:
        return 0.004 + 0.0005 * (plan.prefill_tokens + len(plan.decodes))

    desk.add(100, new=500)
    for _ in range(5):
        plan = desk.step()
        desk.scheduler.observe(plan, cost(plan))
    desk.add(4000)
    for _ in range(30):
        plan = desk.step()
        assert len(plan.decodes) == 1, "the stream must not pause"
        assert cost(plan) < 0.060
        desk.scheduler.observe(plan, cost(plan))


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    desk = Desk()
    prompt = list(range(1, 13))
    desk.add(prompt)
    desk.run()
    again = desk.add(prompt)
    assert chunks(desk.step()) == {"2": 4}  # three full blocks are cached, the last is needed for its logits
    assert again.cached_tokens == 8
    desk.run()
    longer = desk.add([*prompt, 99])
    assert chunks(desk.step()) == {"3": 1}
    assert longer.cached_tokens == 12
    assert (desk.scheduler.prefix_hits, desk.scheduler.prefix_queries) == (20, 37)


def test_tenants_do_not_share_prefixes() -> None:
    desk = Desk()
    prompt = list(range(1, 13))
    desk.add(prompt, tenant="a")
    desk.run()
    assert desk.add(prompt, tenant="b").cached_tokens == -1
    assert chunks(desk.step()) == {"2": 12}


def test_siblings_wait_a_step_and_share_what_the_first_one_computes() -> None:
    desk = Desk(max_tokens=64)
    prompt = list(range(1, 14))
    for _ in range(4):
        desk.add(prompt)
    other = desk.add(6)
    assert chunks(desk.step()) == {"1": 13, "5": 6}  # who has another prompt does not wait
    plan = desk.step()
    assert chunks(plan) == {"2": 1, "3": 1, "4": 1}
    assert other in plan.decodes
    assert len({s.blocks[0] for s in desk.scheduler.running if s is not other}) == 1
    desk.run()


def test_a_sibling_waits_for_nobody_when_the_first_one_is_gone() -> None:
    desk = Desk(max_tokens=4)
    prompt = list(range(1, 14))
    first = desk.add(prompt)
    desk.add(prompt)
    desk.step()
    desk.scheduler.finish(first)
    assert chunks(desk.step()) == {"2": 4}
    desk.run()


def test_an_important_request_does_not_wait_for_a_lesser_sibling() -> None:
    desk = Desk(max_tokens=4)
    prompt = list(range(1, 14))
    desk.add(prompt, priority=1)
    desk.step()
    desk.add(prompt, priority=0)
    assert chunks(desk.step()) == {"2": 4}
    desk.run()


def test_without_room_the_last_in_line_is_preempted_and_finishes_later() -> None:
    desk = Desk(blocks=7, prefix_cache=False)
    first, second = desk.add(9, new=12), desk.add(9, new=12)
    desk.step()
    while second.state == SequenceState.RUNNING:
        plan = desk.step()
    assert plan.preempted == 1
    assert plan.closed == [1]
    assert first.state == SequenceState.RUNNING
    assert second.computed == 0
    assert len(second.tokens) > 9  # what was generated stays known
    desk.run()
    assert desk.scheduler.preemptions == 1
    assert len(second.tokens) == 21


def test_there_is_no_ping_pong() -> None:
    """Steps with five requests over seven blocks stay within a small multiple of running them one by one."""
    desk = Desk(blocks=7)
    for _ in range(5):
        desk.add(10, new=15)
    assert desk.run() <= 5 * 16
    assert desk.scheduler.preemptions <= 5


def test_more_important_requests_push_lesser_ones_out() -> None:
    desk = Desk(blocks=7, max_sequences=2)
    low = [desk.add(8, new=8, priority=5) for _ in range(2)]
    desk.step()
    high = desk.add(8, new=8, priority=0)
    plan = desk.step()
    assert plan.admitted == [high]
    assert low[1].state == SequenceState.WAITING
    assert low[0].state == SequenceState.RUNNING
    desk.run()


def test_equals_never_push_each_other_out() -> None:
    desk = Desk(max_sequences=2)
    running = [desk.add(4, new=6) for _ in range(2)]
    desk.step()
    desk.add(4)
    desk.step()
    assert desk.scheduler.running == running


def test_the_first_in_the_queue_is_not_overtaken_when_memory_is_short() -> None:
    desk = Desk(blocks=8)
    desk.add(12, new=12)
    desk.step()
    large = desk.add(24, new=1)
    small = desk.add(2, new=1)
    desk.step()
    assert large.state == small.state == SequenceState.WAITING
    desk.run()


def test_a_short_prompt_of_another_tenant_overtakes_a_long_one() -> None:
    desk = Desk(max_tokens=8)
    desk.add(60, tenant="a")
    desk.step()
    desk.step()
    desk.add(5, tenant="b")
    desk.step()
    desk.step()
    assert desk.scheduler.running[1].tenant.name == "b"
    assert desk.scheduler.running[1].decoding
    desk.run()


def test_rows_of_logits_bound_how_much_prompt_is_scored_in_a_step() -> None:
    desk = Desk(max_tokens=32, max_sequences=4, max_rows=6)
    desk.add(3, new=9)
    desk.step()
    desk.add(17, scored=True)
    counts = []
    while len(desk.scheduler.running) < 2 or not desk.scheduler.running[1].decoding:
        counts.append(chunks(desk.step()).get("2"))
    assert counts == [5, 5, 5, 2]


def test_no_more_sequences_run_than_a_step_has_tokens_for() -> None:
    desk = Desk(max_tokens=3, max_sequences=8)
    for _ in range(6):
        desk.add(2, new=3)
    while desk.scheduler.running or len(desk.scheduler.waiting):
        plan = desk.step()
        assert len(plan.decodes) + plan.prefill_tokens <= 3


def test_finishing_twice_is_noticed() -> None:
    desk = Desk()
    sequence = desk.add(3)
    desk.scheduler.finish(sequence)
    with pytest.raises(EngineError, match="finished twice"):
        desk.scheduler.finish(sequence)


def test_a_waiting_request_costs_nothing_when_it_is_dropped() -> None:
    desk = Desk()
    for sequence in [desk.add(5) for _ in range(100)]:
        desk.scheduler.finish(sequence)
    assert len(desk.scheduler.waiting) == desk.scheduler.waiting.tokens == 0
    assert desk.scheduler.plan().empty


def test_nothing_is_started_only_to_be_preempted_at_once() -> None:
    desk = Desk(blocks=7)
    desk.add(8, new=20)
    desk.step()
    late = desk.add(16, new=4)  # its four blocks are there, but then the first one could not grow any more
    for _ in range(16):
        desk.step()
        assert late.state == SequenceState.WAITING
    desk.run()
    assert desk.scheduler.preemptions == 0


def test_a_preempted_request_keeps_its_place() -> None:
    desk = Desk(blocks=7, prefix_cache=False, max_sequences=2)
    desk.add(9, new=12)
    second, third = desk.add(9, new=12), desk.add(2)
    desk.step()
    while second.state == SequenceState.RUNNING:
        desk.step()
    assert list(desk.scheduler.waiting) == [second, third]
    desk.run()
