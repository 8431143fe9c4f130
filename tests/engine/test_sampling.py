"""Sampling parameters through the whole engine, on a model whose logits are known: what "off" means, what is removed.

Field cases BR-012, BR-015, BR-018, BR-020, BR-021, BR-022, BR-025.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures.engines import Answer, drain, request
from fixtures.parrot import END, LIKELY, make_parrot, parrot_vocab
from fixtures.tiny import tiny_llama
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import RequestError
from toque.types import SamplingParams

PROMPT = tuple(range(20, 52))
LOOP = {"a": {"b": 3.0, "a": 2.5, "c": 2.0}, "b": {"a": 3.0, "c": 2.9}, "c": {"a": 4.0, "b": 3.5, "c": 3.0}}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(tiny_llama(), EngineOptions(backend="reference", kv_blocks=64, max_sequences=8))


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """a, b and c follow each other with logits of a few units."""
    folder = make_parrot(tmp_path_factory.mktemp("loop"), LOOP)
    return load_engine(folder, EngineOptions(backend="reference", kv_blocks=64, max_sequences=8))


def answer(engine: Engine, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Answer:
    engine.add(request("r", prompt, SamplingParams(**({"max_tokens": 20} | sampling))))  # type: ignore[arg-type]
    found = drain(engine)["r"]
    assert found.error is None
    return found


def tokens(engine: Engine, **sampling: object) -> list[int]:
    return answer(engine, **sampling).tokens


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-12, 5e-324])
def test_a_tiny_temperature_is_greedy(engine: Engine, temperature: float) -> None:
    assert tokens(engine, temperature=temperature) == tokens(engine, temperature=0.0)


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_p": 1}]
)
def test_values_that_mean_off_change_nothing(engine: Engine, off: dict[str, float]) -> None:
    assert tokens(engine, seed=3, **off) == tokens(engine, seed=3)
    assert tokens(engine, temperature=0.0, **off) == tokens(engine, temperature=0.0)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filter_is_greedy(engine: Engine, narrow: dict[str, float]) -> None:
    assert tokens(engine, seed=3, **narrow) == tokens(engine, temperature=0.0)


def test_a_biased_token_is_really_gone(engine: Engine) -> None:
    greedy = tokens(engine, temperature=0.0)
    banned = tokens(engine, temperature=0.0, logit_bias=((greedy[0], -100.0),))
    assert greedy[0] not in banned
    forced = tokens(engine, temperature=0.0, logit_bias=((7, 100.0),))
    assert forced == [7] * 20


def test_an_unknown_biased_id_names_the_field_and_the_others_go_on(engine: Engine) -> None:
    engine.add(request("stream", PROMPT, SamplingParams(temperature=0, max_tokens=20)))
    engine.step()
    with pytest.raises(RequestError, match="logit_bias") as caught:
        engine.add(request("bad", PROMPT, SamplingParams(logit_bias=((99_999_999, 5.0),))))
    assert caught.value.param == "logit_bias"
    assert drain(engine)["stream"].tokens  # the first one left with the step above
    assert engine.kv.held == 0


def test_penalties_count_what_was_generated_and_not_the_prompt(loop: Engine) -> None:
    """The winner of every step, computed by hand: logit - frequency * count - presence * [count > 0]."""
    counts = dict.fromkeys(LOOP, 0)
    expected, here = "", "a"
    for _ in range(12):
        scores = {n: LOOP[here].get(n, 0.0) - 0.3 * counts[n] - 0.2 * (counts[n] > 0) for n in LOOP}
        here = max(scores, key=scores.__getitem__)
        counts[here] += 1
        expected += here
    prompt = tuple(b"bbbbbbbbbba")
    penalised = answer(
        loop, prompt, temperature=0.0, max_tokens=12, presence_penalty=0.2, frequency_penalty=0.3
    )
    assert bytes(penalised.tokens).decode() == expected
    assert expected != "ba" * 6  # without penalties


def test_the_repetition_penalty_counts_the_prompt_too(loop: Engine) -> None:
    # From "a": b 3.0 / 2 = 1.5 against a 2.5 / 2 = 1.25 and c 2.0.
    assert answer(loop, tuple(b"ba"), temperature=0.0, max_tokens=1, repetition_penalty=2.0).tokens == [
        ord("c")
    ]
    assert answer(loop, tuple(b"a"), temperature=0.0, max_tokens=1, repetition_penalty=2.0).tokens == [
        ord("b")
    ]


def test_logprobs_are_those_of_the_raw_logits(loop: Engine) -> None:
    got = answer(loop, tuple(b"a"), temperature=0.5, seed=1, max_tokens=1, logprobs=3, presence_penalty=1.0)
    row = np.zeros(loop.executable.vocab_size)
    for piece, logit in LOOP["a"].items():
        row[ord(piece)] = logit
    expected = row - np.log(np.exp(row).sum())
    entry = got.logprobs[0]
    assert [token for token, _ in entry.top] == [ord("b"), ord("a"), ord("c")]
    for token, logprob in [(entry.token, entry.logprob), *entry.top]:
        assert logprob == pytest.approx(expected[token], abs=1e-3)


def test_logprobs_are_finite_numbers_even_for_ruled_out_tokens(loop: Engine) -> None:
    got = answer(
        loop,
        tuple(b"a"),
        temperature=0.0,
        max_tokens=4,
        logprobs=20,
        min_tokens=4,
        stop_token_ids=(ord("b"),),
        logit_bias=((ord("a"), -100.0),),
    )
    assert ord("b") not in got.tokens
    for entry in got.logprobs:
        json.dumps([entry.logprob, entry.top], allow_nan=False)


def test_padding_ids_are_never_sampled(tmp_path: Path) -> None:
    script = {"a": "b", "b": "a"}
    size = len(parrot_vocab(script))
    folder = make_parrot(tmp_path / "padded", script, padded_vocab=size + 40)
    engine = load_engine(folder, EngineOptions(backend="reference", kv_blocks=16, max_sequences=4))
    assert engine.executable.vocab_size == size + 40
    assert engine.limits.valid_vocab == size
    drawn = answer(engine, tuple(b"zz"), temperature=2.0, seed=5, max_tokens=200).tokens
    assert max(drawn) < size
    with pytest.raises(RequestError, match="logit_bias"):
        answer(engine, logit_bias=((size + 1, 5.0),))
    assert answer(engine, (size + 1, ord("a")), temperature=0.0, max_tokens=1).tokens == [ord("b")]
    with pytest.raises(RequestError, match="prompt"):
        answer(engine, (size + 40,))
    everything = answer(engine, tuple(b"zz"), temperature=0.0, logprobs=20, max_tokens=1).logprobs[0]
    assert all(token < size for token, _ in everything.top)


def test_scoring_a_text_with_no_tokens_to_generate(loop: Engine) -> None:
    got = answer(loop, tuple(b"abca"), temperature=0.0, max_tokens=0, prompt_logprobs=1)
    assert got.tokens == []
    assert got.prompt_logprobs is not None
    assert got.prompt_logprobs[0] is None
    chosen = []
    for here, following, entry in zip("abc", "bca", got.prompt_logprobs[1:], strict=True):
        row = np.zeros(loop.executable.vocab_size)
        for piece, logit in LOOP[here].items():
            row[ord(piece)] = logit
        expected = row - np.log(np.exp(row).sum())
        assert entry is not None
        assert entry.logprob == pytest.approx(expected[ord(following)], abs=1e-3)
        chosen.append(entry.token)
    assert bytes(chosen) == b"bca"


def test_the_end_of_text_ends_an_answer_only_where_it_is_a_stop(tmp_path: Path) -> None:
    script = {"a": "b", "b": END}
    end = parrot_vocab(script).id(END)
    engine = load_engine(
        make_parrot(tmp_path / "m", script), EngineOptions(backend="reference", kv_blocks=16, max_sequences=2)
    )
    stopped = answer(engine, tuple(b"a"), temperature=0.0, stop_token_ids=(end,))
    assert stopped.tokens == [ord("b"), end]
    ignored = answer(engine, tuple(b"a"), temperature=0.0, ignore_eos=True, max_tokens=5)
    assert len(ignored.tokens) == 5
    assert LIKELY > 10  # the script is what decides
