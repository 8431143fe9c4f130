"""Grammars on real models: what they say is valid, whatever they would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fixtures.engines import drain, request
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.formats import load_checkpoint
from toque.text.grammar.spec import GrammarSpec, ToolSpec
from toque.text.tokenizer import Tokenizer, load_tokenizer
from toque.types import FinishReason, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "颜色": {"enum": ["red", "blue"]},
    },
    "required": ["name", "age", "颜色"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Engine, Tokenizer]]:
    pytest.importorskip("toque._native")
    if not MODEL.exists():
        pytest.skip("run `make models` first")
    checkpoint = load_checkpoint(MODEL)
    engine = load_engine(checkpoint, EngineOptions(kv_blocks=128, max_sequences=8))
    yield engine, load_tokenizer(checkpoint)
    engine.close()


def answers(
    loaded: tuple[Engine, Tokenizer], spec: GrammarSpec, count: int, bias: dict[str, float] | None = None
) -> list[str]:
    engine, tokenizer = loaded
    asked = "<|im_start|>user\nTell me about a person.<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(asked, add_special=False)
    biases = tuple(
        (tokenizer.encode(text, add_special=False)[0], value) for text, value in (bias or {}).items()
    )
    for i in range(count):
        sampling = SamplingParams(
            temperature=0.0 if i == 0 else 1.0,
            seed=i,
            max_tokens=200,
            stop_token_ids=tuple(sorted(tokenizer.eos_ids)),
            logit_bias=biases,
        )
        engine.add(request(f"r{i}", prompt, sampling, grammar=spec.encode()))
    done = drain(engine)
    texts = []
    for i in range(count):
        answer = done[f"r{i}"]
        assert answer.finish_reason is FinishReason.STOP, answer
        tokens = answer.tokens if answer.stop_token is None else answer.tokens[:-1]
        texts.append(tokenizer.decode(tokens))
    return texts


def test_a_schema(smollm2: tuple[Engine, Tokenizer]) -> None:
    for text in answers(smollm2, GrammarSpec.json_schema(PERSON), 6):
        assert Draft202012Validator(PERSON).is_valid(json.loads(text)), text


def test_line_breaks_are_bounded_however_likely(smollm2: tuple[Engine, Tokenizer]) -> None:
    """Field case BR-038."""
    bias = {"\n": 20.0, " ": 20.0, "\n\n": 20.0}
    short = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    for text in answers(smollm2, GrammarSpec.json_schema({**short, "additionalProperties": False}), 2, bias):
        assert json.loads(text)["age"] <= 99
        assert not re.search(r"[ \t\r\n]{9,}", text), text


def test_a_forced_call(smollm2: tuple[Engine, Tokenizer]) -> None:
    spec = GrammarSpec.tools("hermes", [ToolSpec("save_person", PERSON)], parallel=False)
    for text in answers(smollm2, spec, 3):
        body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        call = json.loads(body)
        assert call["name"] == "save_person"
        assert Draft202012Validator(PERSON).is_valid(call["arguments"])


def test_a_text_without_what_it_would_say(smollm2: tuple[Engine, Tokenizer]) -> None:
    engine, tokenizer = smollm2
    prompt = tokenizer.encode(
        "<|im_start|>user\nTell me of Paris.<|im_end|>\n<|im_start|>assistant\n", add_special=False
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=24)

    def text(spec: GrammarSpec | None) -> str:
        engine.add(request("r", prompt, sampling, grammar=None if spec is None else spec.encode()))
        return tokenizer.decode(drain(engine)["r"].tokens)

    free = text(None)
    assert text(GrammarSpec.without(["zebra crossing"])) == free
    for words in (free[3:9], free[:20], free[10:40]):
        other = text(GrammarSpec.without([words]))
        assert words not in other
        assert other.strip()


def test_choices(smollm2: tuple[Engine, Tokenizer]) -> None:
    words = ["positive", "negative", "neutral 中"]
    assert set(answers(smollm2, GrammarSpec.choice(words), 6)) <= set(words)
