"""Grammars at work: whitespace, names, ends of answers, tools, and refusals."""

from __future__ import annotations

import threading
import time
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.byte_grammars import (
    CONTROL,
    EOS,
    SIZE,
    TOOL_CALLS,
    accepts,
    allowed,
    compiler,
    random_choice,
    start,
    strict_loads,
    walk,
    whitespace_choice,
)
from toque.errors import GrammarError, RequestError
from toque.text.grammar.spec import GrammarKind, GrammarSpec, ToolSpec, enforced_dialect

AGE = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 200}}, "required": ["age"]}


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({**AGE, "additionalProperties": False}),
        GrammarSpec.json_schema(
            {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3}
        ),
        GrammarSpec.json_object(),
    ],
    ids=["object", "array", "json_object"],
)
def test_a_model_that_loves_line_breaks_still_ends(spec: GrammarSpec) -> None:
    """Field case BR-038: never more than eight blanks in a row, and the document closes."""
    text = walk(spec, whitespace_choice, longest=200)
    strict_loads(text)
    run = longest = 0
    for character in text:
        run = run + 1 if character in " \t\r\n" else 0
        longest = max(longest, run)
    assert longest <= 8
    assert text.lstrip()[0] in "{["


def test_nothing_but_the_end_follows_the_closing_brace() -> None:
    matcher = start(GrammarSpec.json_schema(AGE))
    for byte in b'{"age":7}':
        assert matcher.accept(byte)
    assert matcher.complete
    assert matcher.may_end
    assert allowed(matcher) == [EOS]


def test_control_tokens_and_padding_are_never_allowed() -> None:
    for spec in (
        GrammarSpec.regex("(?s:.*)"),
        GrammarSpec.lark("start: /(?s:.*)/"),
        GrammarSpec.json_object(),
    ):
        tokens = allowed(start(spec))
        assert CONTROL not in tokens
        assert TOOL_CALLS not in tokens
        assert max(tokens) < SIZE


@pytest.mark.parametrize("as_tool", [False, True])
def test_odd_property_names_stay_apart_and_in_order(as_tool: bool) -> None:
    """Field case BR-042."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "颜色": {"enum": ["red", "blue"]},
            "形状": {"type": "string", "maxLength": 3},
            "a-b": {"const": 1},
            "a_b": {"const": 2},
            "a b": {"const": 3},
            "\u00e9": {"const": 4},
            "e\u0301": {"const": 5},
            "": {"const": 6},
            '"q"': {"const": 7},
            "\\n\n\u0001": {"const": 8},
        },
        "additionalProperties": False,
    }
    schema["required"] = list(schema["properties"])
    if as_tool:
        spec = GrammarSpec.tools("hermes", [ToolSpec("f", schema)], parallel=False)
    else:
        spec = GrammarSpec.json_schema(schema)
    for seed in range(10):
        text = walk(spec, random_choice(seed))
        value = strict_loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        if as_tool:
            assert value["name"] == "f"
            value = value["arguments"]
        assert list(value) == schema["required"]
        assert value.pop("颜色") in ("red", "blue")
        value.pop("形状")
        assert list(value.values()) == [1, 2, 3, 4, 5, 6, 7, 8]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=5
    )
)
def test_choices_of_any_text(choices: list[str]) -> None:
    spec = GrammarSpec.choice(choices)
    assert all(accepts(spec, choice) for choice in choices)
    other = choices[0] + "x"
    assert accepts(spec, other) == (other in choices)
    assert walk(spec, random_choice(len(choices))) in choices


def test_a_text_without_some_words() -> None:
    spec = GrammarSpec.without(["capital of France", "日本", "a/b\\.\n", "<|end|>"])
    assert spec.after_thinking("</think>") == spec
    for text in ("", "The capital of Spain", "capital of Franc", "日", "本日", "a/b.", "a/b\\x\n"):
        assert accepts(spec, text), text
    for text in ("capital of France", "The capital of Frances", "x日本x", "a/b\\.\n", "a<|end|>b"):
        assert not accepts(spec, text), text
    assert EOS in allowed(start(spec))


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"\d", "5", True),
        (r"\d", "\u0663", False),  # a digit to Unicode, and to int(), but not what was meant
        (r"\d", "\U00016133", False),  # a digit to newer Unicode tables than Python's
        (r"[\d.]+", "5.3", True),
        (r"[\d\-a]+", "5-a", True),
        (r"[^\d]", "3", False),
        (r"[^\d]", "x", True),
        (r"\D", "3", False),
        (r"[\Dx]", "y", True),
        (r"\\d", "\\d", True),
        (r"\d{2}", "55", True),
    ],
)
def test_a_digit_of_a_regex_is_0_to_9(pattern: str, text: str, fits: bool) -> None:
    assert accepts(GrammarSpec.regex(pattern), text) is fits


def test_a_regex_matches_the_whole_answer() -> None:
    for pattern in (r"\d{3}/[a-z]+\$", r"^\d{3}/[a-z]+\$$", "^\\d{3}\\/[a-z]+\\$"):
        spec = GrammarSpec.regex(pattern)
        assert accepts(spec, "123/ab$")
        assert not accepts(spec, "x123/ab$")
        assert not accepts(spec, "123/ab$ ")
    assert accepts(GrammarSpec.regex("a\nb"), "a\nb")


def test_lark() -> None:
    spec = GrammarSpec.lark('start: "sum " NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/')
    assert accepts(spec, "sum 1+22+333")
    assert not accepts(spec, "sum 1+")


TOOLS = [
    ToolSpec(
        "get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    ),
    ToolSpec(
        "f", {"properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer", "minimum": 3}}}
    ),
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"n": 3}}',
}
JOINED = {"hermes": "\n", "llama3": "; "}


@pytest.mark.parametrize("dialect", sorted(CALLS))
def test_forced_calls(dialect: str) -> None:
    call = CALLS[dialect]
    one = GrammarSpec.tools(dialect, TOOLS, parallel=False)
    many = GrammarSpec.tools(dialect, TOOLS, parallel=True)
    twice = call + JOINED[dialect] + call
    assert accepts(one, call)
    assert not accepts(one, twice)
    assert accepts(many, call)
    assert accepts(many, twice)
    for spec in (one, many):
        assert not accepts(spec, "")
        assert not accepts(spec, "Sure! " + call)
        assert not accepts(spec, call.replace("3", "2"))
        assert not accepts(spec, call.replace('"f"', '"g"'))
        assert not accepts(spec, call.replace('{"n": 3}', '"n"'))


def test_forced_mistral_calls_begin_with_the_control_token() -> None:
    matcher = start(GrammarSpec.tools("mistral", TOOLS, parallel=True))
    assert allowed(matcher) == [TOOL_CALLS]
    assert matcher.accept(TOOL_CALLS)
    for (
        byte
    ) in b'[{"name": "f", "arguments": {"n": 3}}, {"name": "get_weather", "arguments": {"city": "x"}}]':
        assert matcher.accept(byte)
    assert matcher.complete


def test_a_strict_call_may_come_anywhere_in_a_free_answer() -> None:
    for parallel in (True, False):
        free = GrammarSpec.tools("hermes", TOOLS, parallel=parallel, free=True)
        call = CALLS["hermes"]
        for text in ("", "Hello", "a < b {}", "<tool", call, "Hm.\n" + call, call.replace("\n", "")):
            assert accepts(free, text), text
        assert accepts(free, call + "\n" + call) or not parallel
        for text in (
            "<tool_call>",
            "<tool_call>x",
            "Hm. " + call.replace("3", "2"),
            call.replace('"f"', '"h"'),
        ):
            assert not accepts(free, text), text
    llama = GrammarSpec.tools("llama3", TOOLS, parallel=False, free=True)
    assert accepts(llama, "Hello {} there")
    assert accepts(llama, CALLS["llama3"])
    assert not accepts(llama, CALLS["llama3"].replace("3", "2"))
    matcher = start(GrammarSpec.tools("mistral", TOOLS, parallel=True, free=True))
    for byte in b"Hm. ":
        assert matcher.accept(byte)
    assert TOOL_CALLS in allowed(matcher)
    assert EOS in allowed(matcher)
    assert matcher.accept(TOOL_CALLS)
    assert allowed(matcher) == sorted(b" [")


@pytest.mark.parametrize("dialect", sorted(CALLS))
def test_calls_or_json(dialect: str) -> None:
    either = GrammarSpec.tools(dialect, TOOLS, parallel=True, otherwise=GrammarSpec.json_schema(AGE))
    assert accepts(either, CALLS["hermes"])
    assert enforced_dialect(dialect, otherwise=True) == "hermes"
    assert accepts(either, '{"age": 7}')
    assert not accepts(either, "Hello")
    assert not accepts(either, '{"age": "7"}')
    with pytest.raises(RequestError):
        GrammarSpec.tools(dialect, TOOLS, parallel=True, otherwise=GrammarSpec.regex("a"))


def test_dialects_in_python_are_enforced_as_json() -> None:
    for dialect, enforced in (("gemma", "hermes"), ("pythonic", "llama3")):
        assert accepts(GrammarSpec.tools(dialect, TOOLS, parallel=False), CALLS[enforced])
        assert enforced_dialect(dialect) == enforced


def test_reasoning_is_free_until_it_is_closed() -> None:
    spec = GrammarSpec.json_schema(AGE).after_thinking("</think>")
    assert accepts(spec, 'Let me {"see}... </think>\n\n{"age":7}')
    assert not accepts(spec, '{"age":7}')
    assert not accepts(spec, 'x</think>{"age":"7"}')


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (GrammarSpec.regex("(a|b"), "structured_outputs.regex"),
        (GrammarSpec.regex("a(?=b)"), "structured_outputs.regex"),
        (GrammarSpec.lark("start: nowhere"), "structured_outputs.grammar"),
        (GrammarSpec.lark("\x00"), "structured_outputs.grammar"),
        (GrammarSpec.json_schema({"oneOf": [{"minimum": 1}, {"maximum": 5}]}), "response_format"),
        (GrammarSpec.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "response_format"),
        (GrammarSpec.json_schema({"type": "string", "pattern": "["}), "response_format"),
        (GrammarSpec(GrammarKind.TOOLS, {}), "tools"),
    ],
)
def test_what_is_no_grammar_is_the_callers_fault(spec: GrammarSpec, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        start(spec)
    assert caught.value.status == 400
    assert caught.value.param == place


RANGE = {"type": "integer", "minimum": 5, "maximum": 3}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (GrammarSpec.regex("(a"), "structured_outputs.regex cannot be compiled: in a regular expression: unclosed"),
        (GrammarSpec.regex("(?=a)b"), "look-ahead and look-behind, is not supported"),
        (GrammarSpec.regex(r"(a)\1"), "backreferences are not supported"),
        (GrammarSpec.lark("start: nowhere"), "structured_outputs.grammar cannot be compiled: at 1(8): unknown name"),
        (GrammarSpec.json_schema({"pattern": "["}), "the JSON schema cannot be compiled: in a regular expression"),
        (GrammarSpec.json_schema(RANGE), "minimum (5) is greater than maximum (3)"),
    ],
)  # fmt: skip
def test_the_error_says_what_is_wrong(spec: GrammarSpec, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        start(spec)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"kind":"x","value":1,"think":""}', '{"kind":"regex"}', "[" * 100_000]
)
def test_a_damaged_spec_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        compiler().compile(text)


def test_specs_survive_the_journey() -> None:
    for spec in (
        GrammarSpec.json_schema(AGE),
        GrammarSpec.choice(["é"]),
        GrammarSpec.tools("hermes", TOOLS, parallel=True),
    ):
        assert GrammarSpec.decode(spec.encode()) == spec


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}b$"},
        {"type": "string", "pattern": "(a|b)*a(a|b){24}$"},
        {
            "type": "array",
            "maxItems": 1000,
            "items": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}},
        },
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
        {"enum": [f"v{i}" for i in range(2000)]},
        {"type": "string", "minLength": 100_000, "maxLength": 100_000},
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(8, 14)]},
    ],
    ids=lambda schema: next(iter(schema)) + str(len(str(schema))),
)
def test_hostile_schemas_take_little_time(schema: Any) -> None:
    started = time.process_time()  # the machine may be busy with others
    try:
        matcher = start(GrammarSpec.json_schema(schema))
        for byte in b'"aabbabab':
            if byte not in allowed(matcher) or not matcher.accept(byte):
                break
    except RequestError:
        pass
    assert time.process_time() - started < 2.0  # about 0.1 s when the machine is calm


@pytest.mark.parametrize("pattern", ["x{100000}{1000}", "x{5000}{5000}", "x{100}{100}{100}{100}"])
def test_counts_of_counts_are_given_up_soon(pattern: str) -> None:
    """Their masks are made between the steps of everybody's answers. Processor time: a busy machine adds none."""
    began = time.thread_time()
    try:
        matcher = start(GrammarSpec.regex(pattern))
        allowed(matcher)
        matcher.accept(ord("x"))
    except RequestError:
        pass
    assert time.thread_time() - began < 0.8  # about 0.1 s; without the bound, 2 s


def test_a_grammar_is_compiled_once_and_copied_for_each_answer() -> None:
    shared = compiler()
    encoded = GrammarSpec.json_schema(AGE).encode()
    found: list[bool] = []

    def use() -> None:
        for _ in range(20):
            matcher = shared.compile(encoded)
            found.append(all(matcher.accept(byte) for byte in b'{"age":7}') and matcher.complete)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_what_was_refused_is_refused_again_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = llguidance.LLMatcher

    def counted(tokens: Any, source: str, **options: Any) -> Any:
        compiled.append(source)
        return real(tokens, source, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    shared = compiler()
    bad = GrammarSpec.regex("a(b").encode()
    errors = []
    for _ in range(3):
        with pytest.raises(GrammarError) as caught:
            shared.compile(bad)
        errors.append((caught.value.message, caught.value.param, caught.value.status))
    assert len(compiled) == 1
    assert errors == errors[:1] * 3
    assert errors[0][1] == "structured_outputs.regex"
    shared.compile(GrammarSpec.regex("a(b)").encode())  # another one is looked at
    assert len(compiled) == 2


def test_only_so_many_refusals_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.text.grammar.compiler._KEPT_REFUSALS", 2)
    shared = compiler()
    for pattern in ("a(", "b(", "a(", "c(", "a("):
        with pytest.raises(GrammarError):
            shared.compile(GrammarSpec.regex(pattern).encode())
        assert len(shared._refusals) <= 2
