"""What a step has room for, and how guessing pays or is given up."""

from __future__ import annotations

import random

import pytest

from fixtures.engines import drain, make_engine, request
from fixtures.speculate import Guesser, eager
from toque.backends.base import StepBatch, StepResult
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.speculate.pace import StepCost
from toque.engine.speculate.speculator import Speculator
from toque.types import SamplingParams

VOCAB = 64
LONG = SamplingParams(temperature=0.0, max_tokens=200)


class Device(StepCost):
    """A step costs ``fixed`` and a part for every row."""

    def __init__(self, fixed: float) -> None:
        super().__init__()
        self._fixed = fixed

    def seconds(self, first: int, count: int) -> list[float]:
        return [self._fixed + rows for rows in range(first, first + count)]


def truth(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    engine = make_engine(n_blocks=128, context_length=512)
    engine.add(request("truth", prompt, sampling))
    return drain(engine)["truth"].tokens


def answer(wrong: float, fixed: float, requests: int = 1) -> Engine:
    answers: dict[tuple[int, ...], list[int]] = {(i,): truth((i,), LONG) for i in range(1, requests + 1)}
    speculator = Speculator(Guesser(lambda prompt, _: answers[prompt], wrong, vocab_size=VOCAB), 8)
    speculator.cost = Device(fixed)
    engine = make_engine(
        n_blocks=1024,
        context_length=512,
        speculator=speculator,
        max_sequences=32,
        executable=FakeExecutable(vocab_size=VOCAB, block_size=4),
    )
    for (first,), expected in answers.items():
        engine.add(request(f"r{first}", (first,), LONG))
        assert len(expected) == 200
    got = drain(engine)
    assert all(got[f"r{first}"].tokens == expected for (first,), expected in answers.items())
    return engine


def test_right_guesses_are_trusted_more_and_more() -> None:
    stats = answer(0.0, fixed=5.0).stats()
    assert stats.steps < 55
    assert stats.accepted_tokens == stats.drafted_tokens


def test_wrong_guesses_are_given_up() -> None:
    stats = answer(1.0, fixed=5.0).stats()
    assert stats.accepted_tokens <= 5  # by chance
    assert stats.drafted_tokens < 12


def test_where_rows_are_dear_only_sure_guesses_are_made() -> None:
    assert answer(0.4, fixed=0.5).stats().drafted_tokens < 40
    assert answer(0.4, fixed=20.0).stats().drafted_tokens > 100
    assert answer(0.0, fixed=5.0, requests=4).stats().drafted_tokens > 200


def test_a_large_batch_is_left_alone() -> None:
    assert answer(0.2, fixed=5.0, requests=24).stats().drafted_tokens < 100


class Watched(FakeExecutable):
    """Remembers how many tokens and rows each step had."""

    sizes: list[tuple[int, int]]

    def step(self, batch: StepBatch) -> StepResult:
        self.sizes.append((len(batch.tokens), len(batch.rows)))
        return FakeExecutable.step(self, batch)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_take_only_what_is_left(seed: int) -> None:
    rng = random.Random(seed)
    executable = Watched(vocab_size=VOCAB, block_size=4)
    executable.sizes = []
    engine = make_engine(
        n_blocks=40,
        executable=executable,
        speculator=eager(Guesser(truth, 0.5, vocab_size=VOCAB, seed=seed)),
        max_batch_tokens=24,
        max_sequences=6,
    )
    for i in range(10):
        sampling = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0 if i % 4 == 3 else None)
        engine.add(request(f"r{i}", [i, *(rng.randrange(8) for _ in range(rng.randrange(1, 20)))], sampling))
    while engine.has_work:
        engine.step()
        engine.check()
        assert all(s.computed == len(s.tokens) - 1 for s in engine.scheduler.running if s.decoding)
    assert max(tokens for tokens, _ in executable.sizes) <= 24
    assert max(rows for _, rows in executable.sizes) <= 64
    assert engine.stats().accepted_tokens > 0
    assert engine.kv.held == 0
