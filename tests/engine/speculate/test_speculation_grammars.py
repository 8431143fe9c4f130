"""Drafts of answers that follow a grammar: every drafted row is masked as plain decoding would mask it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fixtures.byte_grammars import EOS, PADDED, SHARED
from fixtures.engines import Answer, drain, make_engine, request
from fixtures.speculate import Guesser, eager
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.grammars import Grammars
from toque.engine.speculate.ngram import NgramProposer
from toque.engine.speculate.speculator import Speculator
from toque.text.grammar.compiler import Matcher
from toque.text.grammar.spec import GrammarSpec
from toque.types import FinishReason, SamplingParams

TAGS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["aa", "ab"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[ab]{0,3}$"}, "maxItems": 5},
    },
    "required": ["kind", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": GrammarSpec.json_schema(TAGS).encode(),
    "open": GrammarSpec.regex("[0-3]{3,}").encode(),
    "choice": GrammarSpec.choice(["abcabc", "abcabd"]).encode(),
    "short": GrammarSpec.lark('start: "ab" | "abc" | "abcd"').encode(),
}
PROMPT = (5, 6, 7, 8, 9)


def engine_of(speculator: Speculator | None, compile: Any = SHARED.compile) -> Engine:
    return make_engine(
        executable=FakeExecutable(vocab_size=PADDED, block_size=4),
        grammars=Grammars(compile),
        n_blocks=256,
        context_length=512,
        speculator=speculator,
    )


def asked(name: str, temperature: float, seed: int) -> tuple[tuple[int, ...], SamplingParams]:
    sampling = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=60 if seed % 3 else 7,
        min_tokens=50 if name == "short" else 0,
        stop_token_ids=(EOS,),
        logprobs=1,
    )
    return (*PROMPT, seed), sampling


@cache
def plain(name: str, temperature: float, seed: int) -> Answer:
    engine = engine_of(None)
    prompt, sampling = asked(name, temperature, seed)
    engine.add(request("r", prompt, sampling, grammar=GRAMMARS[name]))
    return drain(engine)["r"]


@pytest.mark.parametrize("wrong", ["ngram", 0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_answer_is_that_of_plain_decoding(name: str, wrong: float | str) -> None:
    # Several at once, as their masks lie in one array, and one without a grammar between them.
    for temperature in (0.0, 1.0):

        def truth(prompt: tuple[int, ...], _: SamplingParams, temperature: float = temperature) -> list[int]:
            return plain(name, temperature, prompt[-1]).tokens if prompt[-1] < 8 else [1, 2, 3]

        proposer = NgramProposer() if isinstance(wrong, str) else Guesser(truth, wrong, vocab_size=PADDED)
        engine = engine_of(eager(proposer))
        for seed in range(8):
            prompt, sampling = asked(name, temperature, seed)
            engine.add(request(f"r{seed}", prompt, sampling, grammar=GRAMMARS[name]))
            if seed == 4:
                engine.add(request("free", (*PROMPT, 99), SamplingParams(temperature=0, max_tokens=9)))
        answers = drain(engine)
        assert len(answers.pop("free").tokens) == 9
        for seed in range(8):
            answer, expected = answers[f"r{seed}"], plain(name, temperature, seed)
            assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
            assert answer.logprobs == expected.logprobs
            assert answer.error == expected.error
        stats = engine.stats()
        if wrong != "ngram":
            assert stats.drafted_tokens > 0
            assert stats.accepted_tokens > 0 or wrong == 1.0


class Tiring:
    """A grammar that becomes too complex after some tokens, as a matcher says it: by refusing them."""

    def __init__(self, inner: Matcher, left: int) -> None:
        self._inner = inner
        self._left = left
        self.error = ""
        self.complete = False
        self.may_end = False

    def fill(self, row: Any) -> None:
        assert not self.error, "a matcher that has failed is asked for a mask"
        self._inner.fill(row)

    def accept(self, token: int) -> bool:
        self._left -= 1
        if self._left < 0:
            self.error = "too complex"
            return False
        return self._inner.accept(token)

    def copy(self) -> Tiring:
        return Tiring(self._inner.copy(), self._left)


@pytest.mark.parametrize("left", [1, 2, 3, 4, 7])
def test_a_grammar_that_gets_too_complex_ends_its_answer_at_the_same_token(left: int) -> None:
    def compile(encoded: str) -> Tiring:
        return Tiring(SHARED.compile(encoded), left)

    def truth(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        return plain("json", 0.0, 1).tokens

    answers = []
    for speculator in (None, eager(Guesser(truth, 0.0, vocab_size=PADDED))):
        engine = engine_of(speculator, compile)
        prompt, sampling = asked("json", 0.0, 1)
        engine.add(request("r", prompt, sampling, grammar=GRAMMARS["json"]))
        engine.add(request("free", (*PROMPT, 99), SamplingParams(temperature=0, max_tokens=9)))
        got = drain(engine)
        assert got["free"].finish_reason is FinishReason.LENGTH
        answers.append(got["r"])
        assert engine.kv.held == 0
    assert answers[0].error is not None
    assert answers[1].error == answers[0].error
    assert answers[1].tokens == answers[0].tokens
