"""Speculation on real backends: every answer is that of plain decoding, bit for bit, whoever guesses and how well."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.engines import Answer, advance, drain, request
from fixtures.speculate import Guesser, eager
from fixtures.tiny import TINY, tiny_llama
from toque.backends import load_backend
from toque.backends.base import BackendOptions
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.engine.sequence import Sequence
from toque.engine.speculate.draft import DraftProposer
from toque.engine.speculate.ngram import NgramProposer
from toque.engine.speculate.proposer import Proposer
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.types import FinishReason, SamplingParams

BACKENDS = ["cpu", "reference"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
# Only these can be said, so texts repeat themselves and every kind of guess is right now and then.
FEW = tuple((token, 60.0) for token in (5, 6, 7, 8))
FIXED = tuple([5, 6, 7, 5, 6, 8, 9, 10] * 5)


@cache
def plain(backend: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    engine = load_engine(tiny_llama(), EngineOptions(backend=backend, kv_blocks=32, threads=1))
    engine.add(request("alone", prompt, sampling))
    answer = drain(engine)["alone"]
    engine.close()
    assert answer.error is None
    return answer


def draft_model(backend: str, seed: int, blocks: int = 64, context: int = 512) -> DraftProposer:
    """With seed 0 it is the very model that is served, with any other it knows nothing of it."""
    checkpoint = tiny_llama(seed)
    graph = fuse(build_graph(replace(TINY, context_length=512), checkpoint.tensors.keys()))
    options = BackendOptions(threads=1, max_batch_tokens=64, max_sequences=64)
    executable = load_backend(backend).lower(graph, checkpoint, options)
    executable.allocate_kv(blocks)
    return DraftProposer(executable, n_blocks=blocks, context_length=context, max_tokens=64, max_sequences=64)


def proposer(backend: str, kind: str) -> Proposer:
    def truth(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        return plain(backend, prompt, sampling).tokens

    if kind == "ngram":
        return NgramProposer()
    if kind.startswith("draft"):
        return draft_model(backend, seed=int(kind[-1]))
    return Guesser(truth, float(kind), vocab_size=160)


KINDS = ["ngram", "draft-0", "draft-1", "0.0", "0.3", "1.0"]


def engine_of(backend: str, kind: str, **options: object) -> Engine:
    chosen = {"kv_blocks": 64, "max_sequences": 16, "threads": 1} | options
    engine = load_engine(tiny_llama(), EngineOptions(backend=backend, **chosen))  # type: ignore[arg-type]
    engine.speculator = eager(proposer(backend, kind))
    return engine


def tried(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.drafted_tokens, stats.accepted_tokens


def same(answer: Answer, expected: Answer) -> None:
    assert answer.error is None
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs  # bit for bit
    assert answer.finish_reason is expected.finish_reason
    assert answer.stop_token == expected.stop_token
    assert answer.prompt_logprobs == expected.prompt_logprobs


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, backend: str) -> Iterator[Engine]:
    engine = engine_of(backend, request.param)
    engine.kind = request.param  # type: ignore[attr-defined]
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=4, logit_bias=FEW),
        replace(GREEDY, temperature=1.0, seed=5, top_k=7, top_p=0.9, min_p=0.02),
        replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, logit_bias=FEW),
        replace(GREEDY, logit_bias=FEW, stop_token_ids=(8,), min_tokens=6, temperature=0.9, seed=1),
        replace(GREEDY, max_tokens=2),
        replace(GREEDY, prompt_logprobs=1, logprobs=0, logit_bias=FEW, seed=3, temperature=1.0),
    ],
    ids=["greedy", "seeded", "filters", "penalties", "stop", "short", "scored"],
)
def test_the_answer_is_that_of_plain_decoding(backend: str, engine: Engine, sampling: SamplingParams) -> None:
    engine.add(request("a", FIXED, sampling))
    same(drain(engine)["a"], plain(backend, FIXED, sampling))
    assert engine.kv.held == 0


def test_right_guesses_save_steps_and_wrong_ones_cost_none(backend: str) -> None:
    steps = {}
    for kind in ("draft-0", "draft-1", "0.0", "1.0"):
        engine = engine_of(backend, kind)
        engine.add(request("a", FIXED, GREEDY))
        same(drain(engine)["a"], plain(backend, FIXED, GREEDY))
        drafted, accepted = tried(engine)
        assert drafted > 0
        assert accepted == 24 - engine.stats().steps
        steps[kind] = engine.stats().steps
        engine.close()
    assert steps["0.0"] == 5  # the prompt's step gives one token, four steps of 1 + 6 the rest
    assert steps["draft-0"] <= 6
    assert steps["1.0"] == 24


def test_neighbours_each_get_their_own_answer(backend: str, engine: Engine) -> None:
    asked = {
        f"r{i}": (FIXED[i : 20 + 3 * i], replace(GREEDY, temperature=i % 3 / 2, seed=i, logit_bias=FEW))
        for i in range(7)
    }
    answers: dict[str, Answer] = {}
    for name, (prompt, sampling) in asked.items():
        engine.add(request(name, prompt, sampling))
        advance(engine, answers)  # they come while others are at work
    drain(engine, answers)
    for name, (prompt, sampling) in asked.items():
        same(answers[name], plain(backend, prompt, sampling))


def test_only_what_was_verified_is_ever_found_in_the_prefix_cache(backend: str, engine: Engine) -> None:
    sampling = replace(GREEDY, max_tokens=60)
    for _ in range(2):
        engine.add(request("a", FIXED, sampling))
        answer = drain(engine)["a"]
        same(answer, plain(backend, FIXED, sampling))
    assert answer.cached_tokens == 32
    longer = FIXED + tuple(answer.tokens)
    engine.add(request("b", longer, sampling))
    again = drain(engine)["b"]
    assert again.cached_tokens == 96  # of 100: whole blocks, the last token of the answer was never computed
    same(again, plain(backend, longer, sampling))


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_go_on_as_if_nothing_had_been(backend: str, kind: str) -> None:
    sampling = replace(GREEDY, max_tokens=60, frequency_penalty=0.5, temperature=0.7, seed=9, logit_bias=FEW)
    engine = engine_of(backend, kind, kv_blocks=6, max_batch_tokens=48)
    prompts = [FIXED, FIXED[3:] + FIXED[:3]]
    for i, prompt in enumerate(prompts):
        engine.add(request(f"r{i}", prompt, sampling))
    answers = drain(engine)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        same(answers[f"r{i}"], plain(backend, prompt, sampling))
    assert engine.kv.held == 0
    engine.close()


def test_aborts_between_steps_give_everything_back(backend: str, engine: Engine) -> None:
    for turn in range(6):
        for i in range(4):
            engine.add(request(f"r{i}", FIXED, replace(GREEDY, max_tokens=40)))
        for _ in range(1 + turn):
            engine.step()
        for i in range(4):
            engine.abort(f"r{i}")
        engine.step()
        engine.check()
        assert engine.kv.held == 0
        if engine.speculator is not None and isinstance(engine.speculator.proposer, DraftProposer):
            assert engine.speculator.proposer.held_blocks == 0


def test_an_answer_ends_where_the_context_does(backend: str) -> None:
    checkpoint = tiny_llama(0)
    engines: list[Answer] = []
    for kind in ("off", "0.0", "draft-0"):
        engine = load_engine(
            checkpoint, EngineOptions(backend=backend, kv_blocks=3, threads=1, context_length=80)
        )
        if kind != "off":
            sampling = replace(GREEDY, max_tokens=None)
            engine.speculator = eager(
                Guesser(lambda _p, _s: engines[0].tokens, 0.0, vocab_size=160)
                if kind == "0.0"
                else draft_model(backend, 0, blocks=3, context=80)
            )
        else:
            sampling = replace(GREEDY, max_tokens=None)
        engine.add(request("a", FIXED, sampling))
        engines.append(drain(engine)["a"])
        engine.close()
    assert len(engines[0].tokens) == 40
    assert engines[0].finish_reason is FinishReason.LENGTH
    for answer in engines[1:]:
        same(answer, engines[0])


def test_a_draft_model_without_room_gives_up_and_the_answer_stands(backend: str) -> None:
    engine = engine_of(backend, "ngram")
    draft = draft_model(backend, 0, blocks=3)
    engine.speculator = eager(draft)
    for i in range(3):
        engine.add(request(f"r{i}", FIXED, replace(GREEDY, seed=i)))
    answers = drain(engine)
    for i in range(3):
        same(answers[f"r{i}"], plain(backend, FIXED, replace(GREEDY, seed=i)))
    assert tried(engine)[1] > 0
    assert draft.held_blocks == 0
    engine.close()


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.2])),
        seed=draw(st.integers(0, 2)),
        max_tokens=draw(st.integers(0, 30)),
        min_tokens=draw(st.sampled_from([0, 0, 5])),
        stop_token_ids=draw(st.sampled_from([(), (), (8,), (6, 7)])),
        logit_bias=draw(st.sampled_from([(), FEW])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


@pytest.mark.parametrize("kind", ["ngram", "draft-0", "0.3"])
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 20), st.integers(21, 40), samplings(), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    ),
    kv_blocks=st.sampled_from([3, 5, 64]),
    chunk=st.sampled_from([16, 40, 512]),
    prefix_cache=st.booleans(),
)
def test_any_mix_of_requests_is_answered_as_each_alone(
    backend: str,
    kind: str,
    requests: list[tuple[int, int, SamplingParams, int]],
    kv_blocks: int,
    chunk: int,
    prefix_cache: bool,
) -> None:
    engine = engine_of(backend, kind, kv_blocks=kv_blocks, max_batch_tokens=chunk, prefix_cache=prefix_cache)
    answers: dict[str, Answer] = {}
    for i, (begin, end, sampling, steps) in enumerate(requests):
        engine.add(request(f"r{i}", FIXED[begin:end], sampling))
        for _ in range(steps):
            advance(engine, answers)
    drain(engine, answers)
    for i, (begin, end, sampling, _) in enumerate(requests):
        same(answers[f"r{i}"], plain(backend, FIXED[begin:end], sampling))
    assert engine.kv.held == 0
    engine.close()


def test_a_proposer_that_fails_ends_speculation_and_no_request(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Guesser):
        def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[list[int]]:
            if sequences[0].computed > 50:
                raise RuntimeError("the draft model is gone")
            return super().propose(sequences, counts)

    engine = engine_of(backend, "ngram")
    engine.speculator = eager(
        Broken(lambda prompt, sampling: plain(backend, prompt, sampling).tokens, 0.5, vocab_size=160)
    )
    for turn in range(2):
        engine.add(request(f"r{turn}", FIXED, GREEDY))
        same(drain(engine)[f"r{turn}"], plain(backend, FIXED, GREEDY))
    assert tried(engine)[0] > 0
    assert [record.getMessage() for record in caplog.records] == [
        "speculation is switched off: Broken failed"
    ]
    assert engine.kv.held == 0
    engine.close()


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_tokens_that_were_wrongly_guessed_leave_no_trace_in_a_quantized_cache(wrong: float) -> None:
    settings = EngineOptions(kv_blocks=64, threads=1, kv_dtype="int8")
    sampling = replace(GREEDY, max_tokens=60)
    answers: list[Answer] = []
    for speculator in (None, eager(Guesser(lambda _p, _s: answers[0].tokens, wrong, vocab_size=160))):
        engine = load_engine(tiny_llama(), settings)
        engine.speculator = speculator
        engine.add(request("a", FIXED, sampling))
        answers.append(drain(engine)["a"])
        engine.close()
    same(answers[1], answers[0])
