"""The engine's promise on a real backend: a request's text does not depend on anything but the request.

Field cases BR-050 (preemption), BR-053 (batch, cache, chunking), BR-024 (seeds), BR-021 (penalties).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from fixtures.engines import Answer, advance, drain, request
from fixtures.tiny import tiny_llama
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.types import SamplingParams


def native_is_current() -> bool:
    try:
        load_engine(tiny_llama(), EngineOptions(backend="cpu", kv_blocks=4, threads=1)).close()
    except (ImportError, AttributeError, TypeError):
        return False
    return True


# A checkout whose native module is not built (or is older than its Python) fails in tests/backends/cpu, not here.
BACKENDS = ["reference", *(["cpu"] if native_is_current() else [])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, seed=42, max_tokens=24)
FIXED = tuple(np.random.default_rng(5).integers(0, 160, 75).tolist())


def neighbours(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, 160, int(random.integers(1, 90))).tolist()) for _ in range(count)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_of(backend: str, **options: object) -> Engine:
    settings = {"kv_blocks": 64, "max_sequences": 16, "threads": 1} | options
    return load_engine(tiny_llama(), EngineOptions(backend=backend, **settings))  # type: ignore[arg-type]


@cache
def solo(backend: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    engine = engine_of(backend)
    engine.add(request("solo", prompt, sampling))
    answer = drain(engine)["solo"]
    engine.close()
    assert answer.error is None
    return answer


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def same(answer: Answer, expected: Answer) -> None:
    assert answer.error is None
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs  # bit for bit
    assert answer.finish_reason is expected.finish_reason


def test_the_model_is_not_so_dull_that_the_promise_would_be_empty(backend: str) -> None:
    texts = {tuple(solo(backend, prompt, GREEDY).tokens) for prompt in neighbours(7)}
    assert len(texts) == 7
    assert len(set(solo(backend, FIXED, GREEDY).tokens)) > 5


def test_greedy_text_is_the_same_in_any_batch(backend: str, engines: list[Engine]) -> None:
    engine = engine_of(backend)
    engines.append(engine)
    engine.add(request("fixed", FIXED, GREEDY))
    for i, prompt in enumerate(neighbours(7)):
        engine.add(request(f"n{i}", prompt, GREEDY))
    answers = drain(engine)
    same(answers["fixed"], solo(backend, FIXED, GREEDY))
    for i, prompt in enumerate(neighbours(7)):
        same(answers[f"n{i}"], solo(backend, prompt, GREEDY))


def test_eight_identical_requests_at_once_answer_like_one(backend: str, engines: list[Engine]) -> None:
    engine = engine_of(backend)
    engines.append(engine)
    for i in range(8):
        engine.add(request(f"r{i}", FIXED, GREEDY))
    for answer in drain(engine).values():
        same(answer, solo(backend, FIXED, GREEDY))


@pytest.mark.parametrize("chunk", [1, 7, 32, 50, 512])
def test_greedy_text_is_the_same_however_the_prompt_is_cut(
    backend: str, engines: list[Engine], chunk: int
) -> None:
    engine = engine_of(backend, max_batch_tokens=chunk)
    engines.append(engine)
    engine.add(request("fixed", FIXED, GREEDY))
    engine.add(request("other", FIXED[::-1], GREEDY))
    answers = drain(engine)
    same(answers["fixed"], solo(backend, FIXED, GREEDY))
    same(answers["other"], solo(backend, FIXED[::-1], GREEDY))


def test_greedy_text_is_the_same_with_a_warm_prefix_cache(backend: str, engines: list[Engine]) -> None:
    engine = engine_of(backend)
    engines.append(engine)
    for turn, cached in enumerate([0, 64, 64]):
        engine.add(request("fixed", FIXED, GREEDY))
        answer = drain(engine)["fixed"]
        assert answer.cached_tokens == cached, f"turn {turn}"
        same(answer, solo(backend, FIXED, GREEDY))
    longer = FIXED + tuple(answer.tokens)  # the next turn of a conversation: its answer is cached too
    engine.add(request("longer", longer, GREEDY))
    answer = drain(engine)["longer"]
    assert answer.cached_tokens == 96
    same(answer, solo(backend, longer, GREEDY))


def test_requests_over_a_common_prefix_that_decode_together_answer_like_each_alone(
    backend: str, engines: list[Engine]
) -> None:
    random = np.random.default_rng(17)
    prefix = tuple(random.integers(0, 160, 300).tolist())
    prompts = [prefix + tuple(random.integers(0, 160, 5 + 9 * i).tolist()) for i in range(6)]
    engine = engine_of(backend)
    engines.append(engine)
    for i, prompt in enumerate(prompts):
        engine.add(request(f"r{i}", prompt, GREEDY))
    answers = drain(engine)
    # All came at once: the first computes the prefix, and the others have it in the same blocks.
    assert [answers[f"r{i}"].cached_tokens for i in range(6)] == [0, 288, 288, 288, 288, 288]
    for i, prompt in enumerate(prompts):
        same(answers[f"r{i}"], solo(backend, prompt, GREEDY))


def test_greedy_text_is_the_same_after_preemption(backend: str, engines: list[Engine]) -> None:
    # Two requests of 110 tokens need four blocks each, and there are six.
    sampling = SamplingParams(
        temperature=0.0, max_tokens=60, logprobs=1, frequency_penalty=0.5, repetition_penalty=1.2
    )
    prompts = [FIXED[:50], FIXED[20:70]]
    engine = engine_of(backend, kv_blocks=6)
    engines.append(engine)
    for i, prompt in enumerate(prompts):
        engine.add(request(f"r{i}", prompt, sampling))
    answers = drain(engine)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        same(answers[f"r{i}"], solo(backend, prompt, sampling))
        assert len(answers[f"r{i}"].tokens) == 60
    assert engine.kv.available == 6


def test_a_seeded_text_is_the_same_after_preemption(backend: str, engines: list[Engine]) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=60)
    engine = engine_of(backend, kv_blocks=6)
    engines.append(engine)
    for i in range(2):
        engine.add(request(f"r{i}", FIXED[10 * i : 10 * i + 50], sampling))
    answers = drain(engine)
    assert engine.stats().preemptions > 0
    for i in range(2):
        same(answers[f"r{i}"], solo(backend, FIXED[10 * i : 10 * i + 50], sampling))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_seeded_text_does_not_depend_on_its_neighbours(
    backend: str, engines: list[Engine], count: int
) -> None:
    engine = engine_of(backend)
    engines.append(engine)
    for i, prompt in enumerate(neighbours(count, seed=count)):
        seed = None if i % 2 else 42 + i
        engine.add(request(f"n{i}", prompt, SamplingParams(temperature=0.9, seed=seed, max_tokens=30)))
    answers: dict[str, Answer] = {}
    for _ in range(3):  # it arrives while the others are at work
        advance(engine, answers)
    engine.add(request("seeded", FIXED, SEEDED))
    same(drain(engine, answers)["seeded"], solo(backend, FIXED, SEEDED))


def test_unseeded_twins_are_not_identical(backend: str, engines: list[Engine]) -> None:
    engine = engine_of(backend)
    engines.append(engine)
    for i in range(4):
        engine.add(request(f"r{i}", FIXED, SamplingParams(temperature=1.0, max_tokens=16)))
    assert len({tuple(answer.tokens) for answer in drain(engine).values()}) > 1


def test_different_seeds_differ_and_equal_seeds_agree(backend: str) -> None:
    texts = [
        tuple(solo(backend, FIXED, SamplingParams(seed=seed, max_tokens=16)).tokens) for seed in (1, 2, 3)
    ]
    assert len(set(texts)) == 3


def test_penalties_count_generated_tokens_of_their_own_request_only(
    backend: str, engines: list[Engine]
) -> None:
    plain = solo(backend, FIXED, GREEDY)
    likely = plain.tokens[0]
    prompt = (likely,) * 10 + FIXED
    penalised = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0)
    first = solo(backend, prompt, SamplingParams(temperature=0.0, max_tokens=12)).tokens[0]
    engine = engine_of(backend)
    engines.append(engine)
    engine.add(request("penalised", prompt, penalised))
    engine.add(request("neighbour", FIXED[:31], GREEDY))
    answers = drain(engine)
    assert answers["penalised"].tokens[0] == first  # the prompt does not count
    same(answers["penalised"], solo(backend, prompt, penalised))
    same(answers["neighbour"], solo(backend, FIXED[:31], GREEDY))


def test_prompt_logprobs_are_those_of_generation(backend: str, engines: list[Engine]) -> None:
    # Score prompt + answer: the answer's entries must be what generation reported, whatever is cached.
    plain = solo(backend, FIXED, GREEDY)
    whole = FIXED + tuple(plain.tokens)
    score = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    for chunk in (512, 19):
        engine = engine_of(backend, max_batch_tokens=chunk)
        engines.append(engine)
        engine.add(request("warm", whole, GREEDY))
        drain(engine)
        engine.add(request("score", whole, score))
        answer = drain(engine)["score"]
        assert answer.tokens == []
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert len(answer.prompt_logprobs) == len(whole)
        assert answer.prompt_logprobs[len(FIXED) :] == plain.logprobs
