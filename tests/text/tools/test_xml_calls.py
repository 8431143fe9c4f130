"""Enforced calls of Qwen 3 Coder: whatever the grammar lets a model write is read as a call with valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from jsonschema import Draft202012Validator

from fixtures.byte_grammars import EOS, accepts, allowed, start
from toque.errors import RequestError
from toque.text.grammar.schema import checked_schema
from toque.text.grammar.spec import GrammarSpec, ToolSpec
from toque.text.tools.choose import tool_parser
from toque.text.tools.parameter_types import ParameterTypes

from .folding import Folded, cut, fold, options

LONGEST = 900
END = b"\n</parameter>"


def spec_of(schemas: dict[str, Any], *, parallel: bool = True) -> GrammarSpec:
    checked = [ToolSpec(name, checked_schema(schema, param="tools")) for name, schema in schemas.items()]
    return GrammarSpec.tools("qwen3-coder", checked, parallel=parallel)


def read(schemas: dict[str, Any], text: str, seed: int = 0, dialect: str = "qwen3-coder") -> Folded:
    """As the gateway reads enforced calls, in pieces that the seed chooses."""
    made = options(schemas, hold=0, schemas=schemas, only_calls=True)
    places = random.Random(seed).choices(range(len(text) + 1), k=4)
    return fold(lambda: tool_parser(dialect, made), cut(text, places))


def walked(spec: GrammarSpec, seed: int) -> str | None:
    """A text that the grammar allows, fond of ends and of what looks like the dialect's own tags; None where it has
    no end by `LONGEST` bytes."""
    matcher, source = start(spec), random.Random(seed)
    answer = bytearray()
    wish = b""
    while not matcher.complete and len(answer) < LONGEST:
        tokens = allowed(matcher)
        if EOS in tokens and source.random() < 0.6:
            break
        if not wish and source.random() < 0.35:
            wish = source.choice(
                [END, END, END, b"</parameter>", b"</function>", b'"', b"null", b"1.5", b"<", b"]}", b" 7"]
            )
        if wish and wish[0] in tokens:
            token, wish = wish[0], wish[1:]
        else:
            wish = b""
            plain = [token for token in tokens if 0x20 <= token < 0x80]
            token = source.choice(plain if plain and source.random() < 0.9 else tokens)
        if token == EOS:
            break
        assert matcher.accept(token), matcher.error
        answer.append(token)
    return answer.decode() if matcher.may_end else None


KEY = st.sampled_from(["a", "b", "é", "a-b"])
ODD_KEY = st.sampled_from(["a b", "", "<x"])
TEXT = st.sampled_from(
    ["x", "", "null", "None", "7", "true", " 1 ", "</parameter>", "[1]", "a\nb", "\n", "</para"]
)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(-3, 30), st.just(0.5), TEXT)
TYPE = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
STRING = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 4),
        "pattern": st.sampled_from(
            ["^a+$", "b", "^[a-z]{2}", "x|y", "^x|y$", "\\d$", "[.$^]", "a$b", "(?i)x"]
        ),
        "format": st.sampled_from(["date", "date", "uuid"]),
        "enum": st.lists(TEXT, min_size=1, max_size=3),
    },
)
LEAF = st.one_of(
    st.just({}),
    st.just(True),
    TYPE.map(lambda name: {"type": name}),
    st.lists(TYPE, min_size=1, max_size=3, unique=True).map(lambda names: {"type": names}),
    STRING,
    st.lists(SCALAR, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALAR.map(lambda value: {"const": value}),
    st.integers(-5, 5).map(lambda least: {"type": "integer", "minimum": least}),
    st.just({"$ref": "#/$defs/d"}),
    st.just({"minimum": 3}),
)


def nested(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda members: {"anyOf": members}),
        st.lists(inner, min_size=1, max_size=2).map(lambda members: {"oneOf": members}),
        inner.map(lambda member: {"allOf": [member]}),
        inner.map(lambda member: {"type": "array", "items": member, "maxItems": 2}),
        inner.map(
            lambda member: {"type": "object", "properties": {"p": member}, "additionalProperties": False}
        ),
    )


VALUE = st.recursive(LEAF, nested, max_leaves=4)
FUNCTION = st.builds(
    lambda properties, needed, others, d: {
        "type": "object",
        "properties": properties,
        "required": [name for name, wanted in zip(properties, needed, strict=False) if wanted],
        **({} if others is None else {"additionalProperties": others}),
        "$defs": {"d": d},
    },
    st.dictionaries(st.one_of(*[KEY] * 9, ODD_KEY), VALUE, min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from([None, False, False, True]),
    LEAF.filter(lambda schema: schema != {"$ref": "#/$defs/d"}),
)


NOW = {"type": "object", "properties": {}, "additionalProperties": False}


def test_whatever_a_random_schema_forces_is_read_as_a_valid_call() -> None:
    count = {"own": 0, "json": 0, "read": 0, "values": 0}

    @settings(
        max_examples=250,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(FUNCTION, st.one_of(*[st.just(NOW)] * 4, FUNCTION), st.integers(0, 9))
    def check(first: Any, second: Any, seed: int) -> None:
        schemas = {"f": first, "other.g-1": second}
        try:
            spec = spec_of(schemas)
            start(spec)
        except RequestError:
            return
        dialect = spec.value["dialect"]
        count["own" if dialect == "qwen3-coder" else "json"] += 1
        text = walked(spec, seed)
        if text is None:
            return
        found = read(schemas, text, seed, dialect)
        assert found.completed == len(found.calls) >= 1, text
        assert found.content == ""
        for name, arguments in found.values:
            count["read"] += dialect == "qwen3-coder"
            count["values"] += len(arguments)
            Draft202012Validator(schemas[name]).validate(arguments)

    check()
    assert min(count.values()) >= 20, count


WEATHER = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["celsius", "kelvin"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "note": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}], "default": None},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_a_call_is_enforced_as_the_model_writes_it() -> None:
    spec = spec_of(WEATHER)
    assert spec.value["dialect"] == "qwen3-coder"
    whole = call(
        "get_weather",
        city="Sao\n\nPaulo </p>",
        days="3",
        unit="kelvin",
        code="BR",
        note="hm",
        tags='["</parameter>"]',
    )
    for text in (whole, call("now"), call("get_weather", city=""), whole + "\n" + call("now")):
        assert accepts(spec, text), text
    for text in (
        "",
        "Sure! " + whole,
        call("get_weather"),  # a city is required
        call("get_weather", city="x", days="0"),
        call("get_weather", city="x", days="three"),
        call("get_weather", city="x", unit="c"),
        call("get_weather", city="x", code="BRA"),
        call("get_weather", city="x", note="y"),
        call("get_weather", city="x</parameter>"),
        call("get_weather", city="x", tags='"a"'),
        call("get_weather", town="x"),
        call("then"),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ):
        assert not accepts(spec, text), text
    assert not accepts(spec_of(WEATHER, parallel=False), call("now") + "\n" + call("now"))
    found = read(WEATHER, whole)
    assert found.values == [
        (
            "get_weather",
            {
                "city": "Sao\n\nPaulo </p>",
                "days": 3,
                "unit": "kelvin",
                "code": "BR",
                "note": "hm",
                "tags": ["</parameter>"],
            },
        )
    ]


def test_a_text_that_would_be_read_as_something_else_is_not_written() -> None:
    for schema, good, bad in (
        (
            {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
            ["null", "nul", "77"],
            ["None", "x"],
        ),
        ({"type": ["string", "integer"]}, ["7", "x", "null", "1.2.3"], ["1.5", " 2e3\n"]),
        ({"enum": ["a", "null", None]}, ["a", "null"], ["None", "b"]),
        ({"type": ["string", "null"], "enum": ["1", None]}, ["1", "null"], ["2"]),
    ):
        schemas = {"f": {"type": "object", "properties": {"a": schema}, "additionalProperties": False}}
        spec = spec_of(schemas)
        assert spec.value["dialect"] == "qwen3-coder", schema
        for value in good:
            assert accepts(spec, call("f", a=value)), (schema, value)
            arguments = read(schemas, call("f", a=value)).values[0][1]
            Draft202012Validator(schemas["f"]).validate(arguments)
        for value in bad:
            assert not accepts(spec, call("f", a=value)), (schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a b": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": "string", "format": "uuid"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array"}]}}},
        {"type": "object", "properties": {"a": {"minimum": 3}}},
    ],
    ids=["any", "blank", "format", "pattern", "others", "mixed", "untyped"],
)  # fmt: skip
def test_what_bare_text_cannot_be_held_to_is_enforced_as_json(schema: dict[str, Any]) -> None:
    spec = spec_of({"f": schema})
    assert spec.value["dialect"] == "hermes"
    assert spec_of({"f": schema, **WEATHER}).value["dialect"] == "hermes"
    start(spec)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "maxLength": 100}, "x < y </par> " * 7, "x" * 101),
        ({"type": "string", "maxLength": 5_000}, "<" * 4_000, "x</parameter>"),
        ({"type": "string", "pattern": "[a-z]+@[a-z]+", "maxLength": 200}, "to ann@home.", "x" * 20),
    ],
)
def test_long_texts_are_written_and_read(schema: dict[str, Any], good: str, bad: str) -> None:
    """A bound of 60 characters and more once had too many states for the lexer: every such call failed."""
    schemas = {
        "f": {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    }
    spec = spec_of(schemas)
    assert spec.value["dialect"] == "qwen3-coder"
    assert accepts(spec, call("f", a=good))
    assert read(schemas, call("f", a=good)).values == [("f", {"a": good})]
    assert not accepts(spec, call("f", a=bad))


def test_references_that_multiply_are_given_up_soon() -> None:
    """Seven levels of 300 references each: all their paths would take longer than anybody lives."""
    definitions: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 300} for i in range(7)
    }
    definitions["a7"] = {"type": "string"}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a0"}},
        "required": ["a"],
        "$defs": definitions,
    }
    assert spec_of({"f": schema}).value["dialect"] == "hermes"
    assert ParameterTypes(schema).kinds("a") == {"string"}
    assert ParameterTypes({"properties": {"a": {"$ref": "#/properties/a"}}}).kinds("a") is None


def test_definitions_that_every_parameter_brings_along_are_bounded() -> None:
    definitions = {
        f"d{i}": {"type": "object", "properties": {"x" * 200: {"type": "integer"}}} for i in range(100)
    }
    properties = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(100)}
    schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }
    assert spec_of({"f": schema}).value["dialect"] == "hermes"
    few = schema | {"properties": {"p0": properties["p0"]}}
    assert spec_of({"f": few}).value["dialect"] == "qwen3-coder"


def test_the_closing_tag_inside_a_string_of_json_does_not_end_the_parameter() -> None:
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "string"}}}}
    for value in ('["</parameter>", "\\"</parameter>"]', '[{"x": "a</parameter>b"}]'):
        found = read(schemas, call("f", a=value, b="y"))
        assert found.values == [("f", {"a": json.loads(value), "b": "y"})]
    for value in ('["a\n', "[1,", "x"):  # no JSON: the tag is one
        assert read(schemas, call("f", a=value, b="y")).values[0][1]["b"] == "y"
