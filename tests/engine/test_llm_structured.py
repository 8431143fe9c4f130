"""Forms in the library: answers keep them, whatever the scripted model would say; bad ones are refused at once."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fixtures.parrot import CHAT_TEMPLATE, make_parrot, script
from toque import LLM, SamplingParams, StructuredOutputs
from toque.errors import GrammarError, RequestError
from toque.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
WARM = SamplingParams(temperature=1.0, seed=7, max_tokens=200)
USER: list[Mapping[str, Any]] = [{"role": "user", "content": "say"}]
DOC = Path(__file__).resolve().parents[2] / "docs/structured-output.md"


class City(BaseModel):
    large: bool
    name: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transitions = script("go:", ["n", "o", "!"]) | {"\n": "x", "x": "y"}
    return make_parrot(tmp_path_factory.mktemp("parrot"), transitions, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, backend="reference", kv_blocks=64, max_sequences=4) as model:
        yield model


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputs(choice=["yes", "maybe"]), "yes|maybe"),
        (StructuredOutputs(regex=r"\d{3}-[ab]"), r"\d{3}-[ab]"),
        (StructuredOutputs(grammar='start: "a" N\nN: /[0-9]/'), r"a[0-9]"),
        (StructuredOutputs(json={"enum": ["p", "q"]}), '"[pq]"'),
        (StructuredOutputs(json='{"type": "boolean"}'), "true|false"),
    ],
)
def test_an_answer_keeps_its_form(llm: LLM, form: StructuredOutputs, pattern: str) -> None:
    for sampling in (GREEDY, WARM):
        answers = [
            llm.generate("go:", sampling, structured_outputs=form),
            llm.chat(USER, sampling, structured_outputs=form),
        ]
        for answer in answers:
            assert re.fullmatch(pattern, answer.text.strip()), answer.text  # JSON may begin with blanks
            assert answer.finish_reason is FinishReason.STOP
    streamed = "".join(delta.text for delta in llm.stream("go:", GREEDY, structured_outputs=form))
    assert streamed == llm.generate("go:", GREEDY, structured_outputs=form).text
    streamed = "".join(delta.text for delta in llm.stream_chat(USER, GREEDY, structured_outputs=form))
    assert streamed == llm.chat(USER, GREEDY, structured_outputs=form).text


def test_a_pydantic_model_and_any_object(llm: LLM) -> None:
    biased = SamplingParams(
        temperature=1.0, seed=3, max_tokens=300, logit_bias=((ord('"'), 20.0), (ord("}"), 20.0))
    )
    City.model_validate_json(
        llm.generate("go:", biased, structured_outputs=StructuredOutputs(json=City)).text
    )
    text = llm.generate("go:", biased, structured_outputs=StructuredOutputs(json_object=True)).text
    assert isinstance(json.loads(text), dict)


def test_one_form_for_all_or_one_for_each(llm: LLM) -> None:
    same = llm.generate(["go:", "go:"], GREEDY, structured_outputs=StructuredOutputs(choice=["b"]))
    assert [answer.text for answer in same] == ["b", "b"]
    forms = [StructuredOutputs(choice=["a"]), None, StructuredOutputs(regex="c{2}")]
    each = llm.generate(["go:", "go:", "go:"], GREEDY, structured_outputs=forms)
    assert [answer.text for answer in each] == ["a", "no!", "cc"]


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (StructuredOutputs(), "exactly one"),
        (StructuredOutputs(json_object=False), "exactly one"),
        (StructuredOutputs(regex="a", choice=["b"]), "regex, choice"),
        (StructuredOutputs(regex="("), "regex"),
        (StructuredOutputs(grammar="start: nothing"), "nothing"),
        (StructuredOutputs(json={"not": {}}), "not"),
        (StructuredOutputs(json="{"), "json"),
        (StructuredOutputs(json=int), "model_json_schema"),
        (StructuredOutputs(choice="yes"), "choice"),
        (StructuredOutputs(choice=[1]), "choice"),  # type: ignore[list-item]
        ([StructuredOutputs(choice=["a"])] * 2, "2 entries for 1"),
        ({"choice": ["a"]}, "StructuredOutputs"),
        ("a", "StructuredOutputs"),
        ([{"choice": ["a"]}], "StructuredOutputs"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM, form: Any, named: str) -> None:
    steps = llm.stats().steps
    with pytest.raises((RequestError, GrammarError), match=named):
        llm.generate(["go:"], GREEDY, structured_outputs=form)
    assert llm.stats().steps == steps


def test_a_form_holds_for_what_follows_the_reasoning(tmp_path: Path) -> None:
    thinking = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    transitions: dict[Any, Any] = {">": "h", "h": "m", "m": "</think>", "</think>": "z"}
    path = make_parrot(tmp_path / "m", transitions, chat_template=thinking)
    with LLM(path, backend="reference", kv_blocks=64) as llm:
        form = StructuredOutputs(choice=["yes", "no"])
        assert re.fullmatch("hm</think>(yes|no)", llm.chat(USER, GREEDY, structured_outputs=form).text)
        with pytest.raises(RequestError, match="reasons before"):
            llm.chat(USER, GREEDY, structured_outputs=StructuredOutputs(grammar='start: "a"'))


def test_the_example_of_the_guide(folder: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (text for text in examples if "from toque" in text)
    source = example.replace('LLM("smollm2")', f'LLM({str(folder)!r}, backend="reference", kv_blocks=64)')
    printed = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(DOC), "exec", dont_inherit=True), scope)
    scope["llm"].close()
    assert re.match(r"(good|bad)\n\d{4}\n\s*[12]\n", printed.getvalue()), printed.getvalue()
