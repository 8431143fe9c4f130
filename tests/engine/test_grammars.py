"""Answers that follow a grammar: masks, endings, waiting for the compiler, and neighbours that notice nothing."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.byte_grammars import EOS, PADDED, SHARED
from fixtures.engines import GREEDY, Answer, advance, drain, make_engine, request
from fixtures.parrot import make_parrot, script
from toque.backends.base import StepBatch, StepResult
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.grammars import Grammars
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import EngineError, GrammarError, RequestError
from toque.text.grammar.compiler import Compiler
from toque.text.grammar.spec import GrammarSpec
from toque.types import FinishReason, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{0,3}$"}, "maxItems": 2},
    },
    "required": ["kind", "n"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(SCHEMA).encode()
DIGITS = GrammarSpec.regex("[0-9]{3,}").encode()
PROMPT = [5, 6, 7, 8, 9]


class Recorder(FakeExecutable):
    """Remembers whether each step came with masks."""

    masked: list[bool]

    def step(self, batch: StepBatch) -> StepResult:
        self.masked.append(batch.masks is not None)
        return super().step(batch)


class Gate:
    """A compiler that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.started = threading.Event()

    def __call__(self, grammar: str) -> Any:
        self.started.set()
        assert self.opened.wait(60)
        return SHARED.compile(grammar)


def grammar_engine(compile: Any = SHARED.compile, **options: Any) -> Engine:
    block_size = options.pop("block_size", 4)
    executable = options.pop("executable", None) or FakeExecutable(vocab_size=PADDED, block_size=block_size)
    settings: dict[str, Any] = {"n_blocks": 256, "context_length": 512, **options}
    return make_engine(executable=executable, block_size=block_size, grammars=Grammars(compile), **settings)


def text(answer: Answer) -> str:
    shown = answer.tokens if answer.stop_token is None else answer.tokens[:-1]
    return bytes(shown).decode()


def until(engine: Engine, answers: dict[str, Answer], name: str) -> Answer:
    for _ in range(2000):
        advance(engine, answers)
        if name in answers and answers[name].finish_reason is not None:
            return answers[name]
    raise AssertionError(f"{name} did not end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_valid_and_ends_with_its_last_brace(temperature: float) -> None:
    engine = grammar_engine()
    for seed in range(20):
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=400, stop_token_ids=(EOS,))
        engine.add(request(f"r{seed}", [*PROMPT, seed], sampling, grammar=JSON))
    for answer in drain(engine).values():
        value = json.loads(text(answer))
        assert value["kind"] in ("a", "b")
        assert 0 <= value["n"] <= 99
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stop_token is None
        assert text(answer).endswith("}")


def test_an_answer_that_may_go_on_ends_with_the_end_token() -> None:
    engine = grammar_engine()
    engine.add(
        request("r", PROMPT, SamplingParams(seed=1, max_tokens=400, stop_token_ids=(EOS,)), grammar=DIGITS)
    )
    answer = drain(engine)["r"]
    assert answer.stop_token == EOS
    assert len(text(answer)) >= 3
    assert text(answer).isdigit()


def test_a_cut_answer_says_so() -> None:
    engine = grammar_engine()
    engine.add(request("r", PROMPT, SamplingParams(temperature=0, max_tokens=5), grammar=JSON))
    answer = drain(engine)["r"]
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.tokens) == 5


def test_completing_at_the_last_token_is_no_cut() -> None:
    engine = grammar_engine()
    choice = GrammarSpec.choice(["abc"]).encode()
    engine.add(request("r", PROMPT, SamplingParams(temperature=0, max_tokens=3), grammar=choice))
    assert drain(engine)["r"].finish_reason is FinishReason.STOP


def test_min_tokens_that_leave_nothing_to_say_end_the_answer() -> None:
    engine = grammar_engine()
    sampling = SamplingParams(temperature=0, min_tokens=50, max_tokens=60, stop_token_ids=(EOS,))
    spec = GrammarSpec.lark('start: "ab" | "abc" | "abcd"').encode()
    engine.add(request("r", PROMPT, sampling, grammar=spec))
    answer = drain(engine)["r"]
    assert (text(answer), answer.finish_reason) == ("abcd", FinishReason.STOP)


def test_neighbours_are_not_touched_and_steps_without_grammars_carry_no_masks() -> None:
    free = {f"free{i}": [7, i, i + 1] for i in range(4)}
    plain = grammar_engine()
    for name, prompt in free.items():
        plain.add(request(name, prompt, SamplingParams(temperature=1, seed=3, max_tokens=30)))
    expected = {name: answer.tokens for name, answer in drain(plain).items()}

    recorder = Recorder(vocab_size=PADDED, block_size=4)
    recorder.masked = []
    engine = grammar_engine(executable=recorder)
    answers: dict[str, Answer] = {}
    sampling = SamplingParams(temperature=1, seed=3, max_tokens=30)
    engine.add(request("free0", free["free0"], sampling))
    for _ in range(5):
        advance(engine, answers)
    assert not any(recorder.masked)
    for name in ("free1", "free2"):
        engine.add(request(name, free[name], sampling))
    engine.add(request("json", PROMPT, SamplingParams(temperature=0, max_tokens=300), grammar=JSON))
    engine.add(request("free3", free["free3"], sampling))
    drain(engine, answers)
    assert any(recorder.masked)
    json.loads(text(answers.pop("json")))
    assert {name: answer.tokens for name, answer in answers.items()} == expected


@pytest.mark.parametrize("chunk", [3, 64])
def test_preemption_and_chunks_change_nothing(chunk: int) -> None:
    def answers(**options: Any) -> tuple[dict[str, str], int]:
        engine = grammar_engine(max_batch_tokens=chunk, max_sequences=3, **options)
        for i in range(6):
            sampling = SamplingParams(temperature=1, seed=i, max_tokens=90)
            engine.add(request(f"r{i}", [*PROMPT, i], sampling, grammar=JSON))
        found = {name: text(answer) for name, answer in drain(engine).items()}
        return found, engine.stats().preemptions

    roomy, _ = answers()
    tight, preemptions = answers(n_blocks=26)
    assert preemptions > 0
    assert tight == roomy
    assert all(json.loads(answer) for answer in tight.values())


def test_streams_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Grammars, "wait", lambda self, seconds: waits.append(seconds))
    gate = Gate()
    engine = grammar_engine(gate)
    answers: dict[str, Answer] = {}
    engine.add(request("slow", PROMPT, SamplingParams(temperature=0, max_tokens=300), grammar=JSON))
    engine.add(request("free", [1, 2, 3], SamplingParams(temperature=0, max_tokens=50)))
    until(engine, answers, "free")
    assert not waits  # no step of theirs waited for it
    monkeypatch.undo()
    assert "slow" not in answers
    assert engine.has_work
    assert engine.stats().waiting == 1
    gate.opened.set()
    json.loads(text(until(engine, answers, "slow")))
    assert not engine.has_work
    engine.close()


class Thirsty:
    """A compiler that works on `HARD` grammars until it is let go, and tells the priority of its threads."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        self.let_go = threading.Event()
        self.took: dict[str, int] = {}

    def __call__(self, grammar: str) -> Any:
        self.threads[grammar] = threading.get_native_id()
        if grammar in HARD:
            while not self.let_go.is_set():
                time.sleep(0.001)
        self.took[grammar] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return SHARED.compile(grammar)


HARD = [GrammarSpec.regex(f"[0-9]{{{count}}}").encode() for count in range(4, 9)]


@pytest.mark.skipif(sys.platform != "linux", reason="only there has each thread a priority of its own")
def test_a_grammar_that_takes_long_leaves_the_cores_to_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.engine.grammars._CPU_S", 0.0)  # whatever has begun has taken long
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    compiler = Thirsty()
    engine = grammar_engine(compiler)
    answers: dict[str, Answer] = {}
    free = SamplingParams(temperature=0, max_tokens=400)
    engine.add(request("free", [1, 2, 3], free))
    for number, grammar in enumerate(HARD[:2]):
        engine.add(request(f"hard{number}", PROMPT, free, grammar=grammar))
    while len(compiler.threads) < 2:
        advance(engine, answers)
    advance(engine, answers)
    for thread in compiler.threads.values():
        assert os.getpriority(os.PRIO_PROCESS, thread) == max(mine, 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
    monkeypatch.setattr("toque.engine.grammars._CPU_S", 1e9)
    engine.add(request("easy", PROMPT, free, grammar=DIGITS))  # which waits for neither
    until(engine, answers, "easy")
    assert compiler.took == {DIGITS: mine}
    assert "hard0" not in answers
    compiler.let_go.set()
    drain(engine, answers)
    assert [len(answers[f"hard{number}"].tokens) for number in range(2)] == [4, 5]
    engine.add(request("later", PROMPT, free, grammar=HARD[4]))
    drain(engine, answers)
    assert compiler.took == {DIGITS: mine, HARD[0]: max(mine, 10), HARD[1]: max(mine, 10), HARD[4]: mine}
    engine.close()


def test_so_many_compile_at_once_and_the_others_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.engine.grammars._CPU_S", 0.0)
    compiler = Thirsty()
    engine = grammar_engine(compiler)
    answers: dict[str, Answer] = {}
    for number, grammar in enumerate(HARD):
        engine.add(request(f"hard{number}", PROMPT, SamplingParams(temperature=0), grammar=grammar))
    engine.add(request("free", [1, 2, 3], SamplingParams(temperature=0, max_tokens=200)))
    most = 4 if sys.platform == "linux" else 2
    while len(compiler.threads) < most:
        advance(engine, answers)
    until(engine, answers, "free")
    assert len(compiler.threads) == most
    compiler.let_go.set()
    drain(engine, answers)
    assert {len(answers[f"hard{number}"].tokens) for number in range(5)} == {4, 5, 6, 7, 8}
    engine.close()


def test_waiting_for_a_compiler_alone_does_not_spin() -> None:
    gate = Gate()
    engine = grammar_engine(gate)
    engine.add(request("slow", PROMPT, GREEDY, grammar=JSON))
    started = time.perf_counter()
    steps = 0
    while time.perf_counter() - started < 0.1:
        assert engine.step() == []
        steps += 1
    assert steps <= 12
    assert engine.stats().steps == 0
    gate.opened.set()
    drain(engine)


@pytest.mark.parametrize("ending", ["abort", "deadline", "close"])
def test_a_request_may_end_while_its_grammar_is_compiled(ending: str) -> None:
    gate = Gate()
    engine = grammar_engine(gate)
    answers: dict[str, Answer] = {}
    deadline = time.time() + 0.02 if ending == "deadline" else None
    engine.add(request("slow", PROMPT, GREEDY, grammar=JSON, deadline=deadline))
    assert gate.started.wait(5)
    if ending == "close":
        engine.close()
        gate.opened.set()
        return
    if ending == "abort":
        engine.abort("slow")
    answer = until(engine, answers, "slow")
    assert answer.finish_reason is (FinishReason.ABORT if ending == "abort" else FinishReason.ERROR)
    assert not engine.has_work
    gate.opened.set()
    engine.add(request("next", PROMPT, GREEDY))
    assert drain(engine, answers)["next"].finish_reason is FinishReason.LENGTH


def test_a_refused_grammar_ends_its_request_only() -> None:
    engine = grammar_engine()
    engine.add(request("bad", PROMPT, GREEDY, grammar=GrammarSpec.regex("(a|b").encode()))
    engine.add(request("worse", PROMPT, GREEDY, grammar="no spec"))
    engine.add(request("good", PROMPT, GREEDY))
    answers = drain(engine)
    for name in ("bad", "worse"):
        assert answers[name].finish_reason is FinishReason.ERROR
        assert answers[name].error_code == GrammarError.code
    assert "unclosed" in str(answers["bad"].error) or "invalid regex" in str(answers["bad"].error)
    assert answers["good"].finish_reason is FinishReason.LENGTH


def test_an_engine_without_grammars_says_so() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="grammars"):
        engine.add(request("r", PROMPT, GREEDY, grammar=JSON))
    assert not engine.has_work


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_model_that_would_say_something_else(backend: str, tmp_path: Path) -> None:
    """A scripted model with a padded head: unconstrained it says "xyz", under grammars what they ask for."""
    if backend == "cpu":
        pytest.importorskip("toque._native")
    path = make_parrot(tmp_path, script(":", ["x", "y", "z"]), padded_vocab=333)
    engine = load_engine(path, EngineOptions(backend=backend, kv_blocks=64, threads=1))
    specs = {
        "choice": GrammarSpec.choice(["yes", "no"]),
        "json": GrammarSpec.json_schema(SCHEMA),
        "regex": GrammarSpec.regex("[xy]{2,4}"),
    }
    for name, spec in specs.items():
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=250, stop_token_ids=(256,))
            engine.add(request(f"{name} {temperature}", b"say:", sampling, grammar=spec.encode()))
    engine.add(request("free", b"say:", SamplingParams(temperature=0, max_tokens=3)))
    answers = {name: text(answer) for name, answer in drain(engine).items()}
    engine.close()
    assert answers["free"] == "xyz"
    for temperature in (0.0, 1.0):
        assert answers[f"choice {temperature}"] in ("yes", "no")
        assert set(answers[f"regex {temperature}"]) <= {"x", "y"}
        assert json.loads(answers[f"json {temperature}"])["kind"] in ("a", "b")


def test_the_vocabulary_is_sorted_once_when_there_is_time_or_for_the_first_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading does not wait for it: a server would start later by what takes longest."""
    warmed: list[bool] = []
    original = Compiler._prepare
    monkeypatch.setattr(Compiler, "_prepare", lambda self: (warmed.append(True), original(self))[1])
    path = make_parrot(tmp_path, script(":", ["x"]))
    options = EngineOptions(backend="reference", kv_blocks=8, threads=1)
    for early in (True, False):
        warmed.clear()
        engine = load_engine(path, options)
        assert not warmed
        if early and (thread := engine.warm_grammars()) is not None:
            thread.join()
            assert warmed == [True]
        engine.add(request("r", b"say:", GREEDY, grammar=GrammarSpec.choice(["yes"]).encode()))
        assert text(drain(engine)["r"]) == "yes"
        assert warmed == [True]
        engine.close()


def test_a_closed_engine_does_not_begin_to_sort_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(compiler: Compiler) -> None:
        pytest.fail("it was begun")

    monkeypatch.setattr(Compiler, "_prepare", prepare)
    path = make_parrot(tmp_path, script(":", ["x"]))
    engine = load_engine(path, EngineOptions(backend="reference", kv_blocks=8, threads=1))
    engine.close()
    thread = engine.warm_grammars()
    assert thread is not None
    thread.join()


def test_a_mask_that_is_too_small_is_never_written_past_its_end() -> None:
    with pytest.raises(EngineError, match="words"):
        SHARED.compile(JSON).fill(np.zeros(4, np.uint32))


def test_the_tokenizer_is_only_asked_for_when_a_grammar_comes() -> None:
    asked: list[int] = []

    def tokenizer() -> Any:
        asked.append(1)
        raise RequestError("no tokenizer")

    engine = grammar_engine(Compiler(tokenizer, PADDED).compile)
    engine.add(request("free", PROMPT, GREEDY))
    drain(engine)
    assert not asked
    engine.add(request("json", PROMPT, GREEDY, grammar=JSON))
    assert drain(engine)["json"].error == "no tokenizer"
