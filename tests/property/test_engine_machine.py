"""Random arrivals, aborts and steps over seven KV blocks: nothing leaks, everybody finishes, nobody is disturbed."""

from __future__ import annotations

import functools
import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.engines import Answer, advance, alone, request
from fixtures.engines import make_engine as new_engine
from fixtures.speculate import Guesser, eager
from toque.engine.speculate.ngram import NgramProposer
from toque.types import FinishReason, SamplingParams

BLOCKS = 7


@functools.cache
def undisturbed(prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    return alone(prompt, sampling, vocab_size=16)


def answer_of(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return undisturbed(prompt, sampling).tokens


@st.composite
def samplings(draw: st.DrawFn, room: int) -> SamplingParams:
    temperature = draw(st.sampled_from([0.0, 0.0, 1.0]))
    return SamplingParams(
        temperature=temperature,
        seed=draw(st.integers(0, 3)),  # an unseeded answer has nothing to compare with
        max_tokens=draw(st.integers(0, room)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_token_ids=draw(st.sampled_from([(), (), (3,), (1, 2)])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 1])),
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 4, 4, 4]),
        chunk=st.sampled_from([3, 5, 16, 64]),
        sequences=st.integers(1, 4),
        prefix_cache=st.booleans(),
        wrong=st.sampled_from([None, None, "ngram", 0.0, 0.2, 1.0]),
    )
    def start(
        self, block_size: int, chunk: int, sequences: int, prefix_cache: bool, wrong: float | str | None
    ) -> None:
        self.proposer = Guesser(answer_of, wrong, vocab_size=16) if isinstance(wrong, float) else None
        speculator = None if wrong is None else eager(self.proposer or NgramProposer())
        self.engine = new_engine(
            n_blocks=BLOCKS,
            block_size=block_size,
            context_length=64,
            vocab_size=16,
            max_batch_tokens=chunk,
            max_sequences=sequences,
            prefix_cache=prefix_cache,
            speculator=speculator,
        )
        self.room = BLOCKS * block_size  # in tokens
        self.answers: dict[str, Answer] = {}
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.names = (f"r{i}" for i in itertools.count())

    @rule(
        data=st.data(),
        stem=st.sampled_from([(), (5,) * 4, (5,) * 9, (6, 7) * 6, (5,) * 8 + (6,) * 8]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.sampled_from([0, 0, 1, -1]),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        data: st.DataObject,
        stem: tuple[int, ...],
        tail: list[int],
        tenant: str,
        priority: int,
        copies: int,
    ) -> None:
        prompt = (*stem, *tail)[-self.room + 1 :]
        sampling = data.draw(samplings(self.room + 1 - len(prompt)))
        for _ in range(copies):
            name = next(self.names)
            self.asked[name] = (prompt, sampling)
            self.engine.add(request(name, prompt, sampling, tenant=tenant, priority=priority))

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.step_once()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [
            name
            for name in self.asked
            if name not in self.answers or self.answers[name].finish_reason is None
        ]
        if live:
            name = data.draw(st.sampled_from(live))
            self.aborted.add(name)
            self.engine.abort(name)

    @rule()
    def abort_unknown(self) -> None:
        self.engine.abort("nobody")

    def step_once(self) -> None:
        running = self.engine.scheduler.running
        before = {s.id: s.computed for s in running}
        first = running[0] if running else None
        had_work = bool(len(running) or len(self.engine.scheduler.waiting)) and not self.aborted
        steps = self.engine.stats().steps
        advance(self.engine, self.answers)
        if had_work:
            assert self.engine.stats().steps == steps + 1, "a step without progress"
        # The first in line is never pushed back, unless somebody more important came before it.
        if first is not None and running and running[0] is first:
            assert first.computed >= before[first.id]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        total = sum(len(p) + (s.max_tokens or 0) + 2 for p, s in self.asked.values())
        for _ in range(20 * total + 10):
            if not self.engine.has_work:
                break
            self.step_once()
        assert not self.engine.has_work, "somebody never finished"
        assert self.engine.kv.held == 0
        assert self.engine.stats().running == self.engine.stats().waiting == 0
        assert self.engine.executable.open_slots == 0  # type: ignore[attr-defined]
        assert self.proposer is None or not self.proposer.slots
        for name, (prompt, sampling) in self.asked.items():
            answer, expected = self.answers[name], undisturbed(prompt, sampling)
            if name in self.aborted and answer.finish_reason is FinishReason.ABORT:
                assert answer.tokens == expected.tokens[: len(answer.tokens)]
                continue
            assert answer.error is None
            assert answer.tokens == expected.tokens
            assert answer.finish_reason is expected.finish_reason
            assert answer.logprobs == expected.logprobs
            assert answer.prompt_logprobs == expected.prompt_logprobs


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
