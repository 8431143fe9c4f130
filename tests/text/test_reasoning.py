"""Reasoning and answer, told apart in every chunking."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.text.reasoning import ReasoningParser


def read(pieces: list[str], opened: bool) -> tuple[str, str]:
    parser = ReasoningParser(opened=opened)
    thoughts = [*map(parser.push, pieces), parser.finish()]
    return "".join(t.reasoning for t in thoughts), "".join(t.content for t in thoughts)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm, 2 < 3.\n</think>\n\nYes.", False, "Hm, 2 < 3.", "Yes."),
        ("\nHm.\n</think>\n\nYes. ", True, "Hm.", "Yes. "),
        ("<think></think>Yes.", False, "", "Yes."),
        ("</think>\nYes.", True, "", "Yes."),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("  Yes", False, "", "  Yes"),
        ("<thin air>", False, "", "<thin air>"),
        ("<think>never closed </thi", False, "never closed </thi", ""),
        ("a </think> b </think> c", True, "a", "b </think> c"),
        ("", True, "", ""),
        ("", False, "", ""),
        ("<thi", False, "", "<thi"),
        ("<think>x</think>", False, "x", ""),
    ],
)
def test_what_is_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert read([text], opened) == (reasoning, content)
    for size in (1, 2, 3):
        assert read([text[i : i + size] for i in range(0, len(text), size)], opened) == (reasoning, content)
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]], opened) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "a", "</"]), max_size=10),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_any_chunking_is_the_same(parts: list[str], opened: bool, places: list[int]) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = read([text], opened)
    assert read(pieces, opened) == whole
    assert read(list(text), opened) == whole


def test_tokens_of_the_reasoning_are_counted_with_its_tags() -> None:
    def count(tokens: list[str], opened: bool) -> int:
        parser = ReasoningParser(opened=opened)
        for token in tokens:
            parser.push(token)
        parser.finish()
        return parser.tokens

    assert count(["<think>", "\n", "Hm", ".", "</think>", "\n\n", "Yes", "."], False) == 5
    assert count(["Hm", "</think>", "Yes", "."], True) == 2
    assert count([" ", "Yes", "."], False) == 0
    assert count(["<thi", "nk>", "a", "b"], False) == 4
