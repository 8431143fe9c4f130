"""Schemas for each keyword of JSON Schema, with instances on both sides of the line.

The instances are only proposals: which are valid, the `jsonschema` package says. ``ENFORCED`` keywords must let no
invalid one through; those in ``REFUSED`` must be named in an error.
"""

from __future__ import annotations

from typing import Any

OBJECTS: list[Any] = [
    {},
    {"a": 1},
    {"a": "x"},
    {"b": 2},
    {"a": 1, "b": 2},
    {"a": 1, "b": "y"},
    {"a": 1, "c": 3},
    {"x-1": 1},
]
STRINGS: list[Any] = [
    "",
    "a",
    "ab",
    "abc",
    "123-x",
    "12-x",
    "é",
    "éé",
    "😀",
    "ABC",
    "a\nb",
    "\u0000",
    '"',
    "\\",
    "١",
]
NUMBERS: list[Any] = [0, 1, 2, 3, 4, 10, 249, 250, 251, -1, -5, -6, 0.5, 1.5, 2.25, 1e2, 12, 15, 100000]
ARRAYS: list[Any] = [[], [1], ["x"], [1, 2], [1, "x"], [1, 2, 3], [[1]], [1, 1], [None, True]]
OTHERS: list[Any] = [None, True, False]
EVERYTHING: list[Any] = [*OBJECTS, *STRINGS, *NUMBERS, *ARRAYS, *OTHERS]

# keyword: (schema, instances)
ENFORCED: dict[str, list[tuple[Any, list[Any]]]] = {
    "type": [
        ({"type": name}, EVERYTHING)
        for name in ("null", "boolean", "integer", "number", "string", "array", "object")
    ]
    + [({"type": ["string", "integer"]}, EVERYTHING)],
    "const": [
        ({"const": value}, [*EVERYTHING, value])
        for value in (1, "é", '"', "\\", "\u0000", None, {"a": [1, {"b": 2}]}, [1, "x"])
    ],
    "enum": [({"enum": ["red", '"', "\\", "é", "\u0000", 3, None, ["x"]]}, EVERYTHING)],
    "minimum": [
        ({"minimum": 3}, EVERYTHING),
        ({"type": "integer", "minimum": 3}, [*NUMBERS]),
        ({"minimum": -5.5}, NUMBERS),
    ],
    "maximum": [
        ({"type": "integer", "minimum": 3, "maximum": 250}, NUMBERS),
        ({"maximum": 2.25}, EVERYTHING),
    ],
    "exclusiveMinimum": [
        ({"exclusiveMinimum": 3}, EVERYTHING),
        ({"type": "integer", "exclusiveMinimum": -6}, NUMBERS),
    ],
    "exclusiveMaximum": [
        ({"exclusiveMaximum": 250}, EVERYTHING),
        ({"type": "number", "exclusiveMaximum": -1}, NUMBERS),
    ],
    "multipleOf": [({"type": "integer", "multipleOf": 5}, NUMBERS), ({"multipleOf": 0.25}, EVERYTHING)],
    "minLength": [({"minLength": 2}, EVERYTHING)],
    "maxLength": [
        ({"maxLength": 2}, EVERYTHING),
        ({"type": "string", "minLength": 1, "maxLength": 1}, STRINGS),
    ],
    "pattern": [
        ({"pattern": r"^\d{3}-[\w]+$"}, EVERYTHING),
        (
            {"type": "string", "pattern": r"^https:\/\/x$"},
            ["https://x", "https://xy", "http://x", "xhttps://x"],
        ),
        ({"pattern": "b"}, EVERYTHING),
        ({"pattern": "^[^a-z]+$"}, STRINGS),
    ],
    "format": [
        (
            {"type": "string", "format": "date"},
            ["2024-02-29", "2023-02-29", "2024-13-01", "2024-04-31", "1900-02-29", "2000-02-29"],
        ),
        ({"format": "ipv4"}, ["127.0.0.1", "256.0.0.1", "1.2.3", 5, None]),
        (
            {"format": "uuid"},
            ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08-aa98-11ea-b4aa73b441d16380", 5],
        ),
        ({"format": "email"}, ["a@b.example", "a@", "@b", 5]),
    ],
    "items": [({"items": {"type": "integer"}}, EVERYTHING), ({"type": "array", "items": False}, ARRAYS)],
    "prefixItems": [
        ({"prefixItems": [{"type": "integer"}, {"type": "string"}]}, EVERYTHING),
        ({"prefixItems": [{"type": "integer"}], "items": False}, ARRAYS),
    ],
    "minItems": [({"minItems": 2}, EVERYTHING), ({"type": "array", "minItems": 2, "maxItems": 2}, ARRAYS)],
    "maxItems": [({"maxItems": 1}, EVERYTHING), ({"maxItems": 2.0}, ARRAYS)],
    "properties": [({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, EVERYTHING)],
    "required": [
        ({"required": ["a"]}, EVERYTHING),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, OBJECTS),
    ],
    "additionalProperties": [
        ({"additionalProperties": False}, EVERYTHING),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, OBJECTS),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^x-": {}},
                "additionalProperties": False,
            },
            OBJECTS,
        ),
    ],
    "patternProperties": [
        ({"patternProperties": {"^a$": {"type": "integer"}, "^x-": {"type": "string"}}}, EVERYTHING)
    ],
    "minProperties": [
        ({"type": "object", "minProperties": 1}, OBJECTS),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2},
            OBJECTS,
        ),
    ],
    "maxProperties": [({"type": "object", "maxProperties": 1}, OBJECTS), ({"maxProperties": 0}, EVERYTHING)],
    "allOf": [
        ({"allOf": [{"minimum": 2}, {"maximum": 10}]}, EVERYTHING),
        (
            {
                "allOf": [
                    {"required": ["a"], "properties": {"a": {"type": "integer"}}},
                    {"properties": {"b": {"type": "string"}}},
                ]
            },
            OBJECTS,
        ),
    ],
    "anyOf": [
        ({"anyOf": [{"type": "integer"}, {"minLength": 2, "type": "string"}]}, EVERYTHING),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 3}]}, STRINGS),
    ],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, EVERYTHING),
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"a": {"const": 1}, "b": {"type": "integer"}},
                        "required": ["a", "b"],
                    },
                    {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
                ]
            },
            OBJECTS,
        ),
    ],
    "$ref": [
        ({"$ref": "#/$defs/short", "$defs": {"short": {"type": "string", "maxLength": 2}}}, EVERYTHING),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
            [{}, {"a": {}}, {"a": {"a": {}}}, {"a": {"b": {}}}, {"a": 1}],
        ),
        (
            {
                "$ref": "#/$defs/a~1b/properties/x~0",
                "$defs": {"a/b": {"properties": {"x~": {"type": "null"}}}},
            },
            EVERYTHING,
        ),
    ],
    "$anchor": [({"$ref": "#short", "$defs": {"s": {"$anchor": "short", "maxLength": 1}}}, STRINGS)],
    "$defs": [({"$defs": {"unused": {"type": "null"}}, "type": "integer"}, EVERYTHING)],
    "definitions": [({"$ref": "#/definitions/n", "definitions": {"n": {"type": "null"}}}, EVERYTHING)],
    "additionalItems": [
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "items": [{"type": "integer"}],
                "additionalItems": {"type": "string"},
            },
            ARRAYS,
        )
    ],
}

ANNOTATIONS: list[Any] = [
    {"type": "integer", name: value}
    for name, value in {
        "title": "t",
        "description": "d",
        "default": "no integer",
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": True,
        "$comment": "c",
        "contentMediaType": "application/json",
        "contentEncoding": "base64",
        "contentSchema": {"type": "string"},
        "x-anything": {"whitespace_flexible": False},
        "$id": "https://x/y",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }.items()
]

REFUSED: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}},
    "then": {"then": {}},
    "else": {"else": {}},
    "contains": {"contains": {"type": "integer"}},
    "minContains": {"minContains": 2},
    "maxContains": {"maxContains": 2},
    "uniqueItems": {"uniqueItems": True},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$dynamicAnchor": {"$dynamicAnchor": "x"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "$vocabulary": {"$vocabulary": {}},
    "nullable": {"nullable": True},
    "minlength": {"minlength": 3},  # a slip of the pen must not pass in silence
    "$ref": {"$ref": "https://example.com/schema"},
    "format": {"format": "idn-email"},
    "pattern": {"pattern": "^(?=a)b"},
    "minProperties": {"type": "object", "minProperties": 2},
    "type": {"type": "str"},
    "maxLength": {"maxLength": 10**9},
    "minItems": {"minItems": -1},
    "multipleOf": {"multipleOf": 0},
    "required": {"required": "a"},
    "enum": {"enum": []},
}
