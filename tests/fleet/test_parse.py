"""Specifications from documents: what is wrong is named, and where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import RequestError
from toque.fleet.parse import check_engine, find, parse, parse_spec
from toque.fleet.spec import DeploymentSpec, RolloutPolicy


def test_a_whole_document_becomes_its_type() -> None:
    spec = parse_spec(
        {
            "name": "chat",
            "model": "smollm2@production",
            "engine": {"threads": 2, "prefix_cache": False, "step_target_ms": 20},
            "scaling": {
                "min_replicas": 0,
                "max_replicas": 3,
                "keep_warm": [{"start": "08:00", "end": "18:00", "days": ["mon", "fri"]}],
            },
            "rollout": {"strategy": "canary", "steps": [0.1, 0.5]},
        }
    )
    assert spec.scaling.keep_warm[0].days == ("mon", "fri")
    assert spec.rollout.steps == (0.1, 0.5)
    assert check_engine(spec).step_target_ms == 20
    assert parse_spec({"name": "a", "model": "b"}) == DeploymentSpec("a", "b")


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"modle": "x"}, "modle", ["did you mean model?"]),
        ({"scaling": {"max_replica": 2}}, "scaling.max_replica", ["did you mean max_replicas?"]),
        (
            {"scaling": {"keep_warm": [{"begin": "1"}]}},
            "scaling.keep_warm[0].begin",
            ["known here are", "start"],
        ),
        ({"engine": {"thread": 2}}, "engine.thread", ["did you mean threads?"]),
        ({"engine": {"threads": "two"}}, "engine.threads", ["int", "'two'"]),
        ({"engine": {"max_sequences": 5000}}, "engine.max_sequences", ["1024", "5000"]),
        ({"scaling": {"max_replicas": 0}}, "scaling.max_replicas", [">= 1", "got 0"]),
        ({"scaling": {"max_replicas": "3"}}, "scaling.max_replicas", ["int", "str"]),
        ({"scaling": 7}, "scaling", ["object", "int"]),
        ({"scaling": {"min_replicas": 4}}, "scaling.min_replicas", ["4", "1"]),
        ({"scaling": {"keep_warm": [{"start": "8", "end": "9:00"}]}}, "scaling.keep_warm[0].start", ["'8'"]),
        (
            {"scaling": {"keep_warm": [{"start": "08:00", "end": "09:00", "min_replicas": 3}]}},
            "scaling.keep_warm[0].min_replicas",
            ["3", "1"],
        ),
        ({"rollout": {"steps": [0.5, 0.1]}}, "rollout.steps", ["0.5, 0.1"]),
        ({"rollout": {"steps": [1.5]}}, "rollout.steps[0]", ["1.5"]),
        ({"rollout": {"strategy": "blue-green"}}, "rollout.strategy", ["blue-green"]),
        ({"name": "../x"}, "name", ["'../x'"]),
        ({"model": " "}, "model", ["empty"]),
        ({"grace_s": -1}, "grace_s", ["-1"]),
        ({"name": None}, "name", ["null"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: dict[str, Any], place: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_spec({"name": "chat", "model": "smollm2", **change})
    assert caught.value.param == place
    for word in (place, *words):
        assert word in caught.value.message


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match="model is required"):
        parse_spec({"name": "a"})
    with pytest.raises(RequestError, match=r"scaling.keep_warm\[0\].end is required"):
        parse_spec({"name": "a", "model": "b", "scaling": {"keep_warm": [{"start": "08:00"}]}})
    with pytest.raises(RequestError, match="expected object, got array"):
        parse([], RolloutPolicy)


def test_a_place_is_found() -> None:
    assert find({"a": [{"b": 1}]}, "a[0].b") == 1
    assert find({"a": 1}, "a[0].b") is None
    assert find([5], "[0]") == 5


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "model", "scaling", "engine", "keep_warm", "start", "steps", "rollout", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(anything)
@settings(deadline=None, max_examples=150)
def test_any_document_is_a_specification_or_a_clear_error(document: object) -> None:
    try:
        made = parse_spec(document)
    except RequestError as error:
        made, message = None, error.message
    else:
        message = "-"
    assert made is None or isinstance(made, DeploymentSpec)
    assert 0 < len(message) < 600
