"""Every keyword of JSON Schema is enforced or refused by name, never ignored (field case BR-040)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from fixtures.byte_grammars import accepts, compact, random_choice, strict_loads, walk
from toque.errors import RequestError
from toque.text.grammar.schema import ANNOTATIONS, ENFORCED, MAX_DEPTH, MAX_PROPERTIES, checked_schema
from toque.text.grammar.spec import GrammarSpec

from . import keyword_corpus as corpus

SPECIFIED = set(Draft202012Validator.VALIDATORS) | set(Draft7Validator.VALIDATORS)


def judge(schema: Any) -> Any:
    kind = Draft7Validator if "draft-07" in str(schema.get("$schema", "")) else Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def test_every_keyword_that_a_validator_knows_is_decided() -> None:
    decided = ENFORCED | ANNOTATIONS | set(corpus.REFUSED)
    assert sorted(SPECIFIED - decided) == []
    assert sorted(ENFORCED - set(corpus.ENFORCED)) == [], "an enforced keyword without a test"


@pytest.mark.parametrize("keyword", sorted(corpus.ENFORCED))
def test_no_invalid_instance_passes(keyword: str) -> None:
    rejected = 0
    for schema, instances in corpus.ENFORCED[keyword]:
        spec = GrammarSpec.json_schema(schema)
        validator = judge(schema)
        passed = 0
        for instance in instances:
            valid = validator.is_valid(instance)
            accepted = accepts(spec, compact(instance))
            assert valid or not accepted, (schema, instance)
            rejected += not valid and not accepted
            passed += accepted
        assert passed or all(not validator.is_valid(instance) for instance in instances), (
            schema,
            "accepts nothing",
        )
    assert rejected


@pytest.mark.parametrize("keyword", sorted(corpus.ENFORCED))
def test_what_is_generated_is_valid(keyword: str) -> None:
    for schema, _ in corpus.ENFORCED[keyword]:
        spec = GrammarSpec.json_schema(schema)
        validator = judge(schema)
        for seed in range(6):
            text = walk(spec, random_choice(seed))
            assert validator.is_valid(json.loads(text)), (schema, text)


@pytest.mark.parametrize("schema", corpus.ANNOTATIONS, ids=lambda schema: next(reversed(schema)))
def test_annotations_change_nothing(schema: Any) -> None:
    spec = GrammarSpec.json_schema(schema)
    assert accepts(spec, "12")
    assert not accepts(spec, '"x"')
    assert accepts(spec, " 12")  # no option of the grammar library can be set from a schema


@pytest.mark.parametrize("keyword", sorted(corpus.REFUSED))
def test_what_cannot_be_enforced_is_refused_with_its_name_and_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, corpus.REFUSED[keyword]]}}}
    with pytest.raises(RequestError) as caught:
        checked_schema(schema)
    assert caught.value.status == 400
    assert f"{keyword} at #/properties/a~1b/anyOf/1/{keyword}" in caught.value.message
    assert caught.value.param == "response_format"


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "integer"}, "$ref": {"type": "null"}},
        "required": ["not"],
    }
    assert accepts(GrammarSpec.json_schema(schema), '{"not":1,"$ref":null}')


STRICT: list[Any] = [
    {"type": "integer", "minimum": 3},
    {"type": "integer", "minimum": -7, "maximum": 250, "multipleOf": 3},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 0.75},
    {"type": "string", "pattern": "^\\d{3}-[\\w]+$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "object", "additionalProperties": False},
    {"enum": ['"', "\\", "é", "\u0000"]},
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "age": {"type": "integer", "minimum": 3},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
            "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["kind", "age"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("number", range(len(STRICT)))
def test_fifty_seeds_of_a_strict_schema_validate(number: int) -> None:
    schema = STRICT[number]
    spec = GrammarSpec.json_schema(schema)
    validator = judge(schema)
    for seed in range(50):
        value = strict_loads(walk(spec, random_choice(seed)))
        assert validator.is_valid(value), value


def test_dates_know_leap_years() -> None:
    spec = GrammarSpec.json_schema({"type": "string", "format": "date"})
    for year in ("1900", "2000", "2023", "2024", "2100", "0400", "9996"):
        leap = int(year) % 4 == 0 and (int(year) % 100 != 0 or int(year) % 400 == 0)
        assert accepts(spec, f'"{year}-02-29"') == leap
        assert accepts(spec, f'"{year}-02-28"')


def test_sizes_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    wide = {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}
    for schema, word in ((deep, "deeper"), (wide, "at most"), ({"enum": list(range(5000))}, "more than")):
        with pytest.raises(RequestError, match=word):
            checked_schema(schema)
    with pytest.raises(RequestError, match="must be an object"):
        checked_schema([])
    with pytest.raises(RequestError, match="back to itself"):
        checked_schema({"$ref": "#"})
    with pytest.raises(RequestError, match="points to nothing"):
        checked_schema({"$ref": "#/$defs/x"})
    with pytest.raises(RequestError, match="characters"):
        GrammarSpec.json_schema({"const": "x" * 300_000}).encode()
