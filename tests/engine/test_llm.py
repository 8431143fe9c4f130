"""The library's face on the scripted model: texts, streams, stop strings, usage, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.parrot import CHAT_TEMPLATE, END, make_parrot, parrot_vocab, script
from toque import LLM, SamplingParams
from toque.engine.completion import CompletionDelta
from toque.errors import ConfigError, EngineError, RequestError, TemplateError, ToqueError
from toque.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SCRIPT = script("go:", [" a", b"\xe6\xad", b"\xaa", " b", "\n"]) | {"x": "y", "y": "x"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_parrot(tmp_path_factory.mktemp("parrot"), SCRIPT)
    with LLM(folder, backend="reference", kv_blocks=32, max_sequences=4) as model:
        yield model


def test_a_text_is_continued(llm: LLM) -> None:
    answer = llm.generate("go:", GREEDY)
    assert answer.text == " a歪 b\n"
    assert answer.finish_reason is FinishReason.STOP
    assert answer.prompt_tokens == 3
    assert answer.completion_tokens == len(answer.tokens) == 6
    assert answer.tokens[-1] == parrot_vocab(SCRIPT).id(END)
    assert answer.logprobs is None
    assert answer.error is None


def test_token_ids_are_used_as_they_are(llm: LLM) -> None:
    assert llm.generate(list(b"go:"), GREEDY).text == " a歪 b\n"
    assert llm.generate(tuple(b"go:"), GREEDY).text == " a歪 b\n"


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    answers = llm.generate(
        ["go:"] + ["x"] * 9, [GREEDY] + [SamplingParams(temperature=0, max_tokens=n) for n in range(9)]
    )
    assert [answer.index for answer in answers] == list(range(10))
    assert [answer.text for answer in answers[1:]] == ["yxyxyxyx"[:n] for n in range(9)]
    assert [answer.completion_tokens for answer in answers[1:]] == list(range(9))
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers[1:])
    assert llm.generate([list(b"x"), list(b"yx")], SamplingParams(temperature=0, max_tokens=1))[1].text == "y"
    assert llm.generate([]) == []


def test_a_stream_adds_up_to_the_answer_and_never_shows_half_a_character(llm: LLM) -> None:
    deltas = list(llm.stream("go:", GREEDY))
    assert "".join(delta.text for delta in deltas) == " a歪 b\n"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [token for delta in deltas for token in delta.tokens] == llm.generate("go:", GREEDY).tokens


@pytest.mark.parametrize(
    ("stop", "text"), [(" b", " a歪"), (["zz", "歪 "], " a"), ("never", " a歪 b\n"), ((), " a歪 b\n")]
)
def test_stop_strings_end_the_answer_and_are_not_part_of_it(llm: LLM, stop: Any, text: str) -> None:
    answer = llm.generate("go:", GREEDY, stop=stop)
    assert answer.text == text
    assert answer.finish_reason is FinishReason.STOP
    assert "".join(delta.text for delta in llm.stream("go:", GREEDY, stop=stop)) == text
    assert llm.engine.kv.held == 0


def test_a_stop_string_stops_the_work(llm: LLM) -> None:
    steps = llm.stats().steps
    llm.generate("x", SamplingParams(temperature=0, max_tokens=500), stop="yx")
    assert llm.stats().steps - steps < 6


def test_leaving_a_stream_early_stops_the_work(llm: LLM) -> None:
    stream = llm.stream(["x", "x"], SamplingParams(temperature=0, max_tokens=500))
    next(stream)
    assert llm.stats().running == 2
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().running == llm.stats().waiting == llm.stats().kv_blocks_used == 0
    assert not llm._inboxes


def test_a_stream_that_nobody_reads_starts_nothing(llm: LLM) -> None:
    llm.stream("x", GREEDY)
    assert not llm.engine.has_work


def test_logprobs_belong_to_their_tokens(llm: LLM) -> None:
    answer = llm.generate("go:", SamplingParams(temperature=0, logprobs=1, prompt_logprobs=0))
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == answer.tokens
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == answer.prompt_tokens
    cut = llm.generate("go:", SamplingParams(temperature=0, logprobs=1), stop=" b")
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.tokens) == 4


@pytest.mark.parametrize(
    "prompts", [None, 5, b"go:", {"a": 1}, [1.5], [1, "x"], ["x", 1], ["x", None], [[1, "x"]], [b"x"]]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY)
    assert error.value.param == "prompt"


def test_wrong_sampling_and_stops_are_refused(llm: LLM) -> None:
    for sampling in ({"temperature": 0}, "hot", [None], 1):
        with pytest.raises(RequestError, match="sampling must be"):
            llm.generate("x", sampling)  # type: ignore[call-overload]
    for stop in (5, [1], {"a": 1}):
        with pytest.raises(RequestError, match="stop must"):
            llm.generate("x", GREEDY, stop=stop)
    with pytest.raises(RequestError, match="stop takes at most 16"):
        llm.generate("x", GREEDY, stop=["y"] * 17)
    assert not llm._inboxes


def test_ids_may_come_from_numpy(llm: LLM) -> None:
    ids = np.frombuffer(b"go:", np.uint8)
    assert llm.generate(ids, GREEDY).text == " a歪 b\n"  # type: ignore[call-overload]
    assert [answer.text for answer in llm.generate([ids, ids], GREEDY)] == [" a歪 b\n"] * 2  # type: ignore[call-overload]


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    llm = LLM(make_parrot(tmp_path, SCRIPT), backend="reference", kv_blocks=8)
    stream = llm.stream("x", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY)
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    assert not llm._inboxes


def test_one_bad_prompt_starts_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate(["go:", ""], GREEDY)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(["go:"], [GREEDY, GREEDY])
    assert llm.stats().kv_blocks_used == 0
    assert not llm.engine.has_work
    assert not llm._inboxes


def test_cached_prompts_are_counted(llm: LLM) -> None:
    prompt = "z" * 69 + "x"
    assert llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)).cached_tokens == 0
    assert llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)).cached_tokens == 64


def test_threads_share_the_engine(llm: LLM) -> None:
    texts: list[str] = []
    limit = SamplingParams(temperature=0, max_tokens=15)

    def work() -> None:
        for _ in range(3):
            texts.append(llm.generate("x", limit).text)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == ["yx" * 7 + "y"] * 18
    assert not llm.engine.has_work


def test_two_streams_can_be_read_in_turns(llm: LLM) -> None:
    first, second = (llm.stream(p, SamplingParams(temperature=0, max_tokens=9)) for p in ("x", "y"))
    pairs = list(zip(first, second, strict=True))
    assert "".join(a.text for a, _ in pairs) == "yxyxyxyxy"
    assert "".join(b.text for _, b in pairs) == "xyxyxyxyx"


def test_without_a_template_chat_says_so(llm: LLM) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_conversation_is_rendered_and_answered(tmp_path: Path) -> None:
    folder = make_parrot(tmp_path / "chat", script("\n", ["Hi", " you"]), chat_template=CHAT_TEMPLATE)
    with LLM(folder, backend="reference", kv_blocks=16) as llm:
        talk = [{"role": "user", "content": "hello"}]
        answer = llm.chat(talk, GREEDY)
        assert answer.text == "Hi you"
        assert answer.prompt_tokens > 5
        both = llm.chat([talk, talk], GREEDY)
        assert [one.text for one in both] == ["Hi you"] * 2
        deltas: list[CompletionDelta] = list(llm.stream_chat(talk, GREEDY))
        assert "".join(delta.text for delta in deltas) == "Hi you"


def test_the_end_of_text_can_be_ignored(llm: LLM) -> None:
    answer = llm.generate("go:", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert answer.completion_tokens == 10
    assert answer.finish_reason is FinishReason.LENGTH


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_block is not an engine option") as caught:
        LLM(tmp_path, kv_block=3)
    assert caught.value.param == "kv_block"
    with pytest.raises(ConfigError, match="max_sequences must be between"):
        LLM(tmp_path, max_sequences=0)


def test_importing_the_library_is_quick_and_light() -> None:
    code = (
        "import time, sys; t = time.process_time(); import toque; toque.LLM;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'grpc', 'pydantic', 'httpx', 'starlette'};"
        "print(time.process_time() - t, *heavy.intersection(sys.modules))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert all(len(run) == 1 for run in runs), f"imported: {runs[0][1:]}"
    assert min(float(run[0]) for run in runs) < 0.5


def test_a_name_that_is_no_path_is_looked_up_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toque.registry.store import Store

    folder = make_parrot(tmp_path / "m", SCRIPT)
    asked: list[str] = []

    def resolve(self: Store, reference: str) -> Path:
        asked.append(reference)
        return folder

    monkeypatch.setattr(Store, "resolve", resolve)
    with LLM("a-model-of-the-catalog", backend="reference", kv_blocks=4, max_sequences=2) as llm:
        assert llm.generate("x", SamplingParams(temperature=0, max_tokens=2)).text == "yx"
    assert asked == ["a-model-of-the-catalog"]


def test_a_model_that_is_nowhere_ends_in_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path))
    with pytest.raises(ToqueError, match=r"missing\.gguf"):
        LLM("./missing.gguf")
