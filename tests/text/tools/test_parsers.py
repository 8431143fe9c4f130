"""Tool calls in every dialect, in every chunking (field cases BR-043 and BR-045)."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.errors import ConfigError
from toque.text.tools.base import HOLD, MAX_CALLS, ParserOptions, TextDelta, ToolDelta
from toque.text.tools.choose import DIALECTS, dialect_of, tool_parser

from .folding import chunkings, cut, fold, maker, options

ARGUMENTS = {"id": 42, "o": {"k": [1, None, True]}}
BODY = '{"id":42,"o":{"k":[1,null,true]}}'
NOTHING: list[Any] = []

# dialect, text, content, calls
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f'<tool_call>\n{{"name":"f","arguments":{BODY}}}\n</tool_call>', "", [("f", ARGUMENTS)]),
    (
        "hermes",
        f'Let me see.\n<tool_call>{{"arguments":{BODY},"name":"f"}}</tool_call>\n',
        "Let me see.",
        [("f", ARGUMENTS)],
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {BODY}}}\n</tool_call>\n<tool_call>\n{{"name": "g"}}\n</tool_call> ',
        "",
        [("f", ARGUMENTS), ("g", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}{"name":"g","arguments":{"a":"</tool_call>"}}</tool_call>',
        "",
        [("f", {}), ("g", {"a": "</tool_call>"})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\": \\"\\u00e9\\\\n\\"}"}</tool_call>',
        "",
        [("f", {"a": "é\n"})],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x\ny\t"}}', "", [("f", {"a": "x\ny\t"})]),
    (
        "hermes",
        '<tool_call>{"name":"f","id":[1,{"name":"z"}],"arguments":{"name":"n","arguments":{}}}</tool_call>done',
        "done",
        [("f", {"name": "n", "arguments": {}})],
    ),
    ("hermes", f' {{"name": "f", "arguments": {BODY}}}', "", [("f", ARGUMENTS)]),
    (
        "hermes",
        '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\nDone',
        "\nDone",
        [("f", {}), ("g", {})],
    ),
    ("llama3", f'{{"name": "f", "parameters": {BODY}}}', "", [("f", ARGUMENTS)]),
    ("llama3", f'<|python_tag|>{{"name": "f", "parameters": {BODY}}}', "", [("f", ARGUMENTS)]),
    (
        "llama3",
        f'Sure {{x}}: {{"type": "function", "name": "f", "parameters": {BODY}}}',
        "Sure {x}:",
        [("f", ARGUMENTS)],
    ),
    (
        "llama3",
        f'{{"name": "f", "parameters": {BODY}}}; {{"name": "g", "parameters": {{}}}};',
        "",
        [("f", ARGUMENTS), ("g", {})],
    ),
    (
        "llama3",
        '{"name": "f", "parameters": {}};<|python_tag|>{"name": "g", "parameters": {}}',
        "",
        [("f", {}), ("g", {})],
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {BODY}}}]', "", [("f", ARGUMENTS)]),
    (
        "mistral",
        f'Hm.[TOOL_CALLS][{{"name":"f","arguments":{BODY}}} , {{"name":"g","arguments":{{}}}}]',
        "Hm.",
        [("f", ARGUMENTS), ("g", {})],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]f[ARGS]{BODY}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]{{}}",
        "",
        [("f", ARGUMENTS), ("g", {})],
    ),
    ("mistral", f"[TOOL_CALLS]f{BODY}", "", [("f", ARGUMENTS)]),
    ("pythonic", "[f(id=42, o={'k': [1, None, true]})]", "", [("f", ARGUMENTS)]),
    (
        "pythonic",
        'Well [1]: [f(a="x]\\")", b=-1.5), g()]<|python_end|>',
        "Well [1]:",
        [("f", {"a": 'x]")', "b": -1.5}), ("g", {})],
    ),
    ("gemma", "```tool_code\nf(id=42, o={'k': [1, None, True]})\n```", "", [("f", ARGUMENTS)]),
    ("gemma", "Ok.\n```tool_code\nprint(f(a='é'))\nx = g()\n```\n", "Ok.", [("f", {"a": "é"}), ("g", {})]),
    ("gemma", "```tool_code\n[f(a=1), g(b=(1, 2))]", "", [("f", {"a": 1}), ("g", {"b": [1, 2]})]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=id>\n42\n</parameter>\n<parameter=o>\n"
        '{"k": [1, null, true]}\n</parameter>\n</function>\n</tool_call>',
        "",
        [("f", ARGUMENTS)],
    ),
    (
        "qwen3-coder",
        'Well.\n<tool_call>\n<function=f>\n<parameter=a>\n1 <\n\n</b> "é\\\n\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call><function=g></function></tool_call>Done",
        "Well.Done",
        [("f", {"a": '1 <\n\n</b> "é\\\n'}), ("g", {})],
    ),
    (
        "qwen3-coder",  # the first tag is left out; two calls between two tags
        "<function=f>\n<parameter=b>None</parameter>\n<parameter=c>2</parameter></function>\n"
        "<function=g>\n<parameter=x>true</parameter><parameter=y>tr</parameter></function></tool_call>",
        "",
        [("f", {"b": None, "c": "2"}), ("g", {"x": True, "y": "tr"})],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=f><parameter=id>many</parameter><parameter=b>-1.5e3</parameter>"
        '<parameter=o>"x"</parameter><parameter=a></parameter></function>',
        "",
        [("f", {"id": "many", "b": -1500.0, "o": '"x"', "a": ""})],
    ),
    (
        "qwen3-coder",
        f"<tool_call><function=f><parameter=a>{'x' * 300}\n</parameter>"
        "<parameter=b>NaN</parameter></function></tool_call>",
        "",
        [("f", {"a": "x" * 300, "b": "NaN"})],
    ),
]

# Not calls, or not well-formed ones: content to the last character.
CONTENT: list[tuple[str, str]] = [
    *(
        (dialect, text)
        for dialect in DIALECTS
        for text in ("", "Hello!", "  a\n\n b \n", "{}", "[1, 2]", "<tool", "x < y > z", '{"a": {"b": 1}}')
    ),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n"),
    ("hermes", "<tool_call>\nf(1)\n</tool_call>"),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}'),
    ("hermes", "<tool_call>{'name':'f'}</tool_call>"),
    ("hermes", '<tool_call>{"arguments":{}}</tool_call>'),
    ("hermes", '<tool_call>{"name":1,"arguments":{}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":[1]}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{},"parameters":{}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":"no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name":"\\ud800","arguments":{}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":01}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":' + "[" * 100),
    ("hermes", '{"name": "unknown", "arguments": {}}'),
    ("hermes", 'So: {"name": "f", "arguments": {}}'),
    ("hermes", '{"city": "Paris", "name": "f"}'),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"name": "f", "other": 1, "parameters": {}}'),
    ("llama3", '{"city": "Paris", "name": "f"}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] nothing to call"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": 1}]'),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(a=g)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(a=" + "[" * 100),
    ("pythonic", "[f(a='\\ud800')]"),
    ("gemma", "```tool_code\nimport os\n```"),
    ("gemma", "```tool_code\nf(a=os.environ)\n```"),
    ("gemma", "```tool_code"),
    ("gemma", "```python\nf(a=1)\n```"),
    ("gemma", "```tool_code\n" + "-" * 5000 + "1\n```"),
    ("qwen3-coder", "<tool_call>\n"),
    ("qwen3-coder", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
    ("qwen3-coder", "<tool_call><function=f"),
    ("qwen3-coder", "<tool_call><function=f g></function></tool_call>"),
    ("qwen3-coder", "<tool_call><function=></function></tool_call>"),
    ("qwen3-coder", f"<tool_call><function={'n' * 300}></function></tool_call>"),
    ("qwen3-coder", "<function=unknown></function>"),
    ("qwen3-coder", "<tool_call><function=f>a</function></tool_call>"),
    ("qwen3-coder", "<tool_call><function=f>\n<parameter=a>1</parameter>x</function></tool_call>"),
    ("qwen3-coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=id>\n1"),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=id>\n1\n</parameter>\n"),
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), WELL_FORMED)
@pytest.mark.parametrize("hold", [HOLD, 0])
def test_every_chunking_gives_the_same_calls(
    dialect: str, text: str, content: str, calls: list[tuple[str, Any]], hold: int
) -> None:
    make = maker(dialect, hold=hold)
    whole = fold(make, [text])
    assert whole.content.rstrip() == content
    assert whole.values == calls
    assert whole.completed == len(calls)
    for pieces in chunkings(text):
        assert fold(make, pieces) == whole, pieces


@pytest.mark.parametrize(("dialect", "text"), CONTENT)
def test_what_is_no_call_is_content_to_the_last_character(dialect: str, text: str) -> None:
    for pieces in chunkings(text) if len(text) < 200 else [[text], list(text)]:
        folded = fold(maker(dialect), pieces)
        assert (folded.content, folded.calls, folded.completed) == (text, NOTHING, 0), pieces


def test_prose_around_a_call_is_kept_and_tags_never_show() -> None:
    text = '<b> <tool_call>{"name":"f","arguments":{}}</tool_call>\nThat was it, < 3.'
    for pieces in chunkings(text):
        folded = fold(maker("hermes"), pieces)
        assert folded.content == "<b>\nThat was it, < 3."
        assert folded.calls == [("f", "{}")]


def test_a_call_begins_with_id_and_name_and_then_streams_its_arguments() -> None:
    long = json.dumps({"code": "x = 1\n" * 200})
    text = f'<tool_call>{{"name":"f","arguments":{long}}}</tool_call>'
    parser = tool_parser("hermes", ParserOptions())
    deltas = [delta for character in text for delta in parser.push(character)]
    assert all(isinstance(delta, ToolDelta) for delta in deltas)
    assert len(deltas) > 500, "arguments wait for the end of the call"
    first, *rest = deltas
    assert isinstance(first, ToolDelta)
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert re.fullmatch("call_[A-Za-z0-9]{24}", str(first.id))
    assert "".join(delta.arguments for delta in rest if isinstance(delta, ToolDelta)) == long


def test_a_call_that_breaks_after_it_was_shown_is_not_counted() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":"' + "x" * HOLD + '"]}}</tool_call>'
    for pieces in ([text], list(text)):
        folded = fold(maker("hermes"), pieces)
        assert folded.completed == 0
        assert [name for name, _ in folded.calls] == ["f"]
        assert folded.calls[0][1] + folded.content == '{"a":"' + "x" * HOLD + '"' + "]}}</tool_call>"


def test_a_bare_text_streams_as_it_comes() -> None:
    code = "x = 1\n" * 200
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{code}\n</parameter>\n</function>\n</tool_call>"
    parser = maker("qwen3-coder")()
    deltas = [delta for character in text for delta in parser.push(character)]
    assert len(deltas) > 500, "arguments wait for the end of the call"
    shown = "".join(delta.arguments for delta in deltas if isinstance(delta, ToolDelta))
    assert json.loads(shown) == {"a": code}


def test_a_cut_or_broken_call_of_bare_texts_keeps_what_was_shown() -> None:
    head = "<tool_call>\n<function=f>\n<parameter=a>\n" + "x" * HOLD
    for text, arguments, content in (
        (head + "\n</par", '{"a": "' + "x" * HOLD, ""),
        (head + "</parameter>\n<parameter=id>12", '{"a": "' + "x" * HOLD + '", "id": 12', ""),
        (head + "</parameter>y", '{"a": "' + "x" * HOLD + '"', "y"),
    ):
        for pieces in ([text], list(text)):
            folded = fold(maker("qwen3-coder"), pieces)
            assert folded.completed == 0
            assert (folded.calls, folded.content) == ([("f", arguments)], content)


def test_a_cut_call_is_not_counted() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":"' + "x" * 2 * HOLD
    for pieces in ([text], list(text)):
        folded = fold(maker("hermes"), pieces)
        assert (folded.completed, folded.content) == (0, "")
        assert folded.calls == [("f", '{"a":"' + "x" * 2 * HOLD)]


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_without_parallel_calls_the_answer_is_over_after_one(dialect: str) -> None:
    text = next(text for name, text, _, calls in WELL_FORMED if name == dialect and len(calls) == 2)
    for pieces in chunkings(text):
        parser = tool_parser(dialect, options(("f", "g"), parallel=False))
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        assert parser.done or dialect == "gemma"
        deltas += parser.finish()
        assert {delta.index for delta in deltas if isinstance(delta, ToolDelta)} == {0}
        assert parser.completed == 1
        assert parser.push("more") == []


def test_ids_are_unique_over_answers_and_fit_the_templates() -> None:
    ids: set[str] = set()
    for _ in range(50):
        deltas = tool_parser("mistral", ParserOptions()).push('[TOOL_CALLS][{"name":"f"},{"name":"f"}]')
        ids |= {str(delta.id) for delta in deltas if isinstance(delta, ToolDelta) and delta.id}
    assert len(ids) == 100
    assert all(re.fullmatch("[A-Za-z0-9]{9}", found) for found in ids)


def test_calls_are_bounded() -> None:
    call = '<tool_call>{"name":"f"}</tool_call>'
    folded = fold(maker("hermes"), [call * (MAX_CALLS + 2)])
    assert len(folded.calls) == MAX_CALLS
    assert folded.content.count("<tool_call>") == 2


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "<parameter=b>",
        "</parameter>",
        "<|python_tag|>",
        "```tool_code\n",
        "```",
    ),
    *(
        '{"name":"f","arguments":{"a":1}}',
        '{"name": "f", "parameters": {}}',
        "[f(a=1), g()]",
        'f(b="x")',
        BODY,
    ),
    *(
        '{"name":"f","arguments":{"long":"',
        "y" * 150,
        '"name"',
        '"arguments":',
        '"f"',
        "f",
        "print(",
        ")",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        ":",
        ",",
        ";",
        '"',
        "'",
        "\\",
        "\\u00e9",
        "\\ud800",
        "é",
        "\n",
        " ",
        "<",
        "a",
        "1",
        "-1.5e3",
        "true",
        "null",
        "#",
    ),
]


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@given(data=st.data())
def test_any_text_in_any_chunking_folds_to_the_same(dialect: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14))
    text = "".join(pieces)
    hold = data.draw(st.sampled_from([HOLD, 0]))
    whole = fold(maker(dialect, hold=hold), [text])
    for places in (range(len(text)), data.draw(st.lists(st.integers(0, 10_000), max_size=6))):
        assert fold(maker(dialect, hold=hold), cut(text, places)) == whole
    if not whole.calls:
        assert (
            whole.content == text.replace("<|python_tag|>", "")
            if dialect == "pythonic"
            else whole.content == text
        )
    for _, arguments in itertools.islice(whole.calls, whole.completed):
        if whole.completed == len(whole.calls):
            assert isinstance(json.loads(arguments), dict)


def test_dialects_are_found_in_templates() -> None:
    assert dialect_of(None) == "hermes"
    assert dialect_of("nothing to see") == "hermes"
    assert dialect_of("... <tool_call>\n{{ tool_call.name }}") == "hermes"
    assert dialect_of("<tool_call>\n<function=example_function_name>") == "qwen3-coder"
    assert dialect_of("{{ '[TOOL_CALLS] [' }}") == "mistral"
    assert dialect_of('Respond in the format {"name": function name, "parameters": dictionary}') == "llama3"
    assert dialect_of("[func_name1(params_name1=params_value1)] <|python_tag|>") == "pythonic"
    assert dialect_of("<start_of_turn>model") == "gemma"
    with pytest.raises(ConfigError, match="hermes"):
        tool_parser("esperanto", ParserOptions())


def test_plain_text_is_passed_on_at_once() -> None:
    for dialect in DIALECTS:
        parser = tool_parser(dialect, ParserOptions())
        assert parser.push("Hello, world") == [TextDelta("Hello, world")]
