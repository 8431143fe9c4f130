"""``--speculate`` with models from files: the draft model's checks, and text with stop strings, as users meet it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fixtures.parrot import make_parrot, script
from fixtures.speculate import eager
from toque.engine.llm import LLM
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.engine.speculate.draft import DraftProposer
from toque.engine.speculate.ngram import NgramProposer
from toque.errors import ConfigError, ToqueError
from toque.types import SamplingParams

WORDS = [" one", " two", " three", "\u6b6a", " four", " five", " st", "op", " never"]
PROMPT = "one two three\u6b6a four five stop never: " * 3 + ":"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parrot(tmp_path_factory.mktemp("parrot") / "target", script(":", WORDS))


@pytest.mark.parametrize("stop", [(), ("stop",), ("five st",), ("\u6b6a four",), ("t",)])
@pytest.mark.parametrize("by", ["ngram", "draft"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_text_and_stop_strings_are_those_of_plain_decoding(
    model: Path, stop: tuple[str, ...], by: str, backend: str
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1)
    with LLM(model, backend=backend, threads=1, kv_blocks=32) as llm:
        expected = llm.generate(PROMPT, sampling, stop=stop)
        deltas = [delta.text for delta in llm.stream(PROMPT, sampling, stop=stop)]
    speculate = "ngram" if by == "ngram" else f"draft={model}"
    with LLM(model, backend=backend, threads=1, kv_blocks=32, speculate=speculate) as llm:
        engine = llm._engine
        assert engine is not None
        assert engine.speculator is not None
        assert isinstance(engine.speculator.proposer, NgramProposer if by == "ngram" else DraftProposer)
        engine.speculator = eager(engine.speculator.proposer)
        assert dataclasses.asdict(llm.generate(PROMPT, sampling, stop=stop)) == dataclasses.asdict(expected)
        guessed = [delta.text for delta in llm.stream(PROMPT, sampling, stop=stop)]
        assert "".join(guessed) == "".join(deltas) == expected.text
        if by == "draft" and not stop:
            assert engine.stats().accepted_tokens >= 6
            assert len(guessed) < len(deltas)
        assert engine.kv.held == 0


def test_a_draft_model_shares_the_memory_bound(model: Path) -> None:
    plain = load_engine(model, EngineOptions(threads=1, kv_memory_mb=1))
    drafted = load_engine(model, EngineOptions(threads=1, kv_memory_mb=1, speculate=f"draft={model}:3"))
    assert drafted.kv.n_blocks == plain.kv.n_blocks // 2
    assert drafted.speculator is not None
    assert drafted.speculator.most == 3
    plain.close()
    drafted.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([" one", " two", " three"], "has another: .* tokens in one and"),
        ([*WORDS[:-1], " ever"], "has another: token .* is ' ever' in one and ' never' in the other"),
    ],
)
def test_a_draft_model_of_another_vocabulary_is_refused(
    model: Path, tmp_path: Path, words: list[str], why: str
) -> None:
    other = make_parrot(tmp_path / "draft", script(":", words))
    with pytest.raises(ConfigError, match=f"(?s)same vocabulary as target, draft {why}") as refused:
        load_engine(model, EngineOptions(threads=1, kv_blocks=8, speculate=f"draft={other}"))
    assert refused.value.param == "speculate"


def test_a_draft_model_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ToqueError, match="nowhere"):
        load_engine(model, EngineOptions(threads=1, kv_blocks=8, speculate=f"draft={tmp_path}/nowhere"))
