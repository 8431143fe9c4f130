"""Any JSON schema is enforced or refused by name: what a random one forces is valid for it (field case BR-040)."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from jsonschema import Draft202012Validator

from fixtures.byte_grammars import accepts, compact, random_choice, start, walk
from toque.errors import RequestError
from toque.text.grammar.spec import GrammarSpec

KEY = st.sampled_from(["a", "b", "é", '"q', "$ref", "type", ""])
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-20, 20),
    st.sampled_from([0.5, -1.25, 1e3]),
    st.text('aé"\\\n', max_size=3),
)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEY, inner, max_size=2), max_leaves=4
)
# What the keywords take, and now and then what they do not.
SIZE = st.one_of(st.integers(-1, 4), st.sampled_from([1.0, 2.5, "1", None, 10**9]))
NUMBER = st.one_of(st.integers(-9, 9), st.sampled_from([0.5, 2.25, -3.75, 1e20, "1", True]))
TYPE = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
# No \p{…}: Python's expressions, with which the judge works, have no such classes.
PATTERN = st.sampled_from(["^a+$", "b", "[", "(?=a)", "^\\d{2}$", "x|y", ".*", "^$"])

LONGEST = 300  # characters; an answer that has no end by then proves nothing


def keywords(inner: SearchStrategy[Any]) -> dict[str, SearchStrategy[Any]]:
    return {
        "type": st.one_of(TYPE, st.lists(TYPE, max_size=3, unique=True), VALUE),
        "enum": st.lists(VALUE, max_size=3),
        "const": VALUE,
        "minimum": NUMBER,
        "maximum": NUMBER,
        "exclusiveMinimum": NUMBER,
        "exclusiveMaximum": NUMBER,
        "multipleOf": NUMBER,
        "minLength": SIZE,
        "maxLength": SIZE,
        "pattern": PATTERN,
        "format": st.sampled_from(["date", "ipv4", "uuid", "x"]),
        "items": inner,
        "prefixItems": st.lists(inner, max_size=2),
        "minItems": SIZE,
        "maxItems": SIZE,
        "properties": st.dictionaries(KEY, inner, max_size=3),
        "required": st.lists(KEY, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERN, inner, max_size=1),
        "minProperties": SIZE,
        "maxProperties": SIZE,
        "anyOf": st.lists(inner, max_size=2),
        "allOf": st.lists(inner, max_size=2),
        "oneOf": st.lists(inner, max_size=2),
        "not": inner,
        "title": st.text(max_size=2),
        "unknown": VALUE,
        "$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/x", "x"]),
        "$defs": st.dictionaries(st.just("x"), inner, max_size=1),
    }


def few(inner: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    """Objects of at most four keywords: next to nothing with all of them would be accepted."""
    known = keywords(inner)
    chosen = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: known[name] for name in names}))


LEAF: SearchStrategy[Any] = st.one_of(st.booleans(), TYPE.map(lambda name: {"type": name}), st.just({}))
SCHEMA = st.recursive(st.one_of(st.booleans(), few(LEAF)), few, max_leaves=5)


def test_what_a_random_schema_forces_is_valid_for_it_or_it_is_refused_by_name() -> None:
    count = {"refused": 0, "forced": 0}

    @settings(
        max_examples=1500,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMA, st.integers(0, 5), VALUE)
    def check(schema: Any, seed: int, value: Any) -> None:
        try:
            spec = GrammarSpec.json_schema(schema)
            start(spec)
        except RequestError as error:
            count["refused"] += 1
            judge_refusal(schema, error)
            return
        judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        if accepts(spec, compact(value)):
            assert judge.is_valid(value), (schema, value)
        text = walk_or_none(spec, seed)
        if text is not None:
            count["forced"] += 1
            assert judge.is_valid(json.loads(text)), (schema, text)

    check()
    assert min(count.values()) >= 200, count


def walk_or_none(spec: GrammarSpec, seed: int) -> str | None:
    try:
        return walk(spec, random_choice(seed), LONGEST)
    except AssertionError as error:
        if "no end after" in str(error):
            return None
        raise


def judge_refusal(schema: Any, error: RequestError) -> None:
    """It names a keyword of the schema, or says what no keyword alone is to blame for."""
    assert error.status == 400
    assert error.param == "response_format"
    place = re.match(r"response_format: (\S+) at #", error.message)
    what = r"the JSON schema cannot be compiled: (\w+ constraints are|\$ref to a schema around it is) not"
    place = place or re.match(what, error.message)
    if place is not None:
        assert f'"{place[1].split()[0]}":' in compact(schema), (schema, error.message)
        return
    assert error.message.startswith(
        (
            "response_format: the schema must be an object",
            "the JSON schema cannot be compiled: Unsatisfiable schema",
            "the JSON schema cannot be compiled: in a regular expression",
            "the JSON schema cannot be compiled: nothing can match it",
        )
    ), (schema, error.message)
