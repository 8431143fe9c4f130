"""An answer that another engine has begun goes on as if it had not moved: at every token, with every way of sampling.

The engine that takes over is a fresh one (nothing cached, other slots), like a replica that a stream migrates to.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fixtures.byte_grammars import EOS, PADDED, SHARED
from fixtures.engines import Answer, drain, make_engine, request
from fixtures.tiny import tiny_llama
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.grammars import Grammars
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, RequestError
from toque.text.grammar.spec import GrammarSpec
from toque.types import FinishReason, SamplingParams

PROMPT = tuple(np.random.default_rng(11).integers(0, 160, 41).tolist())
OTHER = tuple(np.random.default_rng(12).integers(0, 160, 23).tolist())
N = 14
SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
).encode()

WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=N),
    "seeded": SamplingParams(temperature=0.9, seed=42, max_tokens=N),
    "filtered": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=7, max_tokens=N),
    "penalties of the answer": SamplingParams(
        temperature=0.7, seed=3, presence_penalty=1.5, frequency_penalty=0.8, max_tokens=N
    ),
    "penalty of prompt and answer": SamplingParams(temperature=0.0, repetition_penalty=1.6, max_tokens=N),
    "biased and banned": SamplingParams(
        temperature=0.8, seed=5, logit_bias=((3, 4.0), (17, -100.0)), max_tokens=N
    ),
    "logprobs": SamplingParams(temperature=0.6, seed=9, logprobs=3, max_tokens=N),
    "not before min_tokens": SamplingParams(
        temperature=0.0, min_tokens=9, max_tokens=N, stop_token_ids=tuple(range(0, 160, 2))
    ),
}


def real_engine(backend: str) -> Engine:
    options = EngineOptions(backend=backend, kv_blocks=32, max_sequences=4, threads=1)
    return load_engine(tiny_llama(), options)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("way", WAYS)
def test_goes_on_as_if_it_had_not_moved(backend: str, way: str) -> None:
    sampling = WAYS[way]
    first, second = real_engine(backend), real_engine(backend)
    try:
        first.add(request("whole", PROMPT, sampling))
        whole = drain(first)["whole"]
        assert len(whole.tokens) > 8
        for at in range(1, len(whole.tokens)):
            resumed = request(f"at {at}", PROMPT, sampling, generated=tuple(whole.tokens[:at]))
            second.add(resumed)
            second.add(request(f"beside {at}", OTHER, sampling))
            same(drain(second)[resumed.request_id], whole, at)
    finally:
        first.close()
        second.close()


def grammar_engine() -> Engine:
    executable = FakeExecutable(vocab_size=PADDED, block_size=4)
    return make_engine(
        executable=executable,
        vocab_size=PADDED,
        n_blocks=64,
        context_length=200,
        grammars=Grammars(SHARED.compile),
    )


def test_goes_on_in_the_middle_of_a_grammar() -> None:
    sampling = SamplingParams(temperature=0.9, seed=4, max_tokens=150, stop_token_ids=(EOS,))
    engine = grammar_engine()
    engine.add(request("whole", (1, 2, 3), sampling, grammar=SCHEMA))
    whole = drain(engine)["whole"]
    assert len(whole.tokens) > 20
    for at in range(1, len(whole.tokens)):
        engine = grammar_engine()
        begun = tuple(whole.tokens[:at])
        engine.add(request("r", (1, 2, 3), sampling, grammar=SCHEMA, generated=begun))
        same(drain(engine)["r"], whole, at)
        engine.close()


def test_a_beginning_that_its_grammar_does_not_allow_is_an_error_of_that_request() -> None:
    engine = grammar_engine()
    engine.add(request("r", (1, 2), grammar=SCHEMA, generated=tuple(b"no")))
    answer = drain(engine)["r"]
    assert answer.finish_reason is FinishReason.ERROR
    assert "does not match its grammar" in (answer.error or "")
    engine.close()


def test_a_beginning_is_checked_like_a_prompt() -> None:
    engine = make_engine(vocab_size=64)
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    with pytest.raises(RequestError, match="between 0 and 63"):
        engine.add(request("r", (1,), sampling, generated=(64,)))
    with pytest.raises(RequestError, match="between 0 and 63"):
        engine.add(request("r", (1,), sampling, generated=(-1,)))
    with pytest.raises(RequestError, match="it is complete"):
        engine.add(request("r", (1,), sampling, generated=(1, 2, 3, 4)))
    with pytest.raises(RequestError, match="it is complete"):
        engine.add(request("r", (1,), replace(sampling, max_tokens=0), generated=(1,)))
    with pytest.raises(ContextLengthError):
        engine.add(request("r", [1] * 64, sampling, generated=(1,)))
    assert not engine.has_work


def same(rest: Answer, whole: Answer, at: int) -> None:
    assert rest.error is None
    assert rest.tokens == whole.tokens[at:], f"from token {at}"
    assert rest.logprobs == whole.logprobs[at:]
    assert rest.finish_reason is whole.finish_reason
    assert rest.stop_token == whole.stop_token
