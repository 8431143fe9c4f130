"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.engine.speculate import ngram
from toque.engine.speculate.ngram import NgramProposer
from toque.engine.speculate.proposer import NO_LEAD


def sequence(tokens: list[int], slot: int = 0) -> Any:
    return SimpleNamespace(tokens=tokens, slot=slot)


def ask(proposer: NgramProposer, tokens: list[int], count: int) -> list[int]:
    one = [sequence(tokens)]
    return [] if proposer.leads(one) == [NO_LEAD] else proposer.propose(one, [count])[0]


def fresh(tokens: list[int], count: int = 4) -> list[int]:
    proposer = NgramProposer()
    proposer.open(sequence(tokens))
    return ask(proposer, tokens, count)


def longest_match(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """By brute force: the length of the longest match before the end, and every place after one of that length."""
    best = 1
    places: list[int] = []
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, most) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, places = length, []
        if length == best > 1:
            places.append(place)
    return best, places


@given(st.lists(st.integers(0, 3), max_size=40))
def test_a_guess_is_what_followed_the_longest_match(tokens: list[int]) -> None:
    proposer = NgramProposer()
    proposer.open(sequence(tokens))
    (lead,) = proposer.leads([sequence(tokens)])
    best, places = longest_match(tokens, 24)
    if not places:
        assert lead == NO_LEAD
        return
    if len(tokens) <= 18:  # few enough candidates that all are looked at
        assert lead == best
        assert proposer.propose([sequence(tokens)], [1])[0][0] == tokens[places[-1]]
    assert 2 <= lead <= best


def test_the_guess_goes_on_to_the_end_and_round_again() -> None:
    assert fresh([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert fresh([1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert fresh([7, 7, 7], 4) == [7, 7, 7, 7]
    assert fresh([1, 2, 3, 4], 4) == []
    assert fresh([1], 4) == []


def test_tokens_are_indexed_as_they_come() -> None:
    rng = random.Random(1)
    text = [rng.randrange(5) for _ in range(300)]
    proposer = NgramProposer()
    proposer.open(sequence([]))
    for end in range(0, 300, 3):
        whole, (lead,) = fresh(text[:end]), proposer.leads([sequence(text[:end])])
        assert lead >= 2 or whole == []


def test_a_copied_passage_is_followed_across_a_word_that_differs() -> None:
    source = list(range(100, 140))
    answer = [*source[:10], 7, *source[11:13]]
    proposer = NgramProposer()
    tokens = [*source, 1, 2]
    proposer.open(sequence(tokens))
    guesses = []
    for token in answer:
        tokens.append(token)
        guesses.append((ask(proposer, tokens, 1) or [-1])[0])
    assert guesses[1:10] == source[2:11]  # the copy, and a guess that the answer contradicts
    assert guesses[10:12] == source[11:13]  # no pair was ever seen with 7, yet the passage goes on


def test_a_copy_that_went_elsewhere_is_given_up() -> None:
    source = list(range(100, 140))
    proposer = NgramProposer()
    tokens = [*source, 1, 2, *source[:8]]
    proposer.open(sequence(tokens))
    assert ask(proposer, tokens, 1) == [108]
    guessed = []
    for token in range(200, 210):
        tokens.append(token)
        guessed.append(bool(ask(proposer, tokens, 1)))
    assert guessed == [True] * 4 + [False] * 6


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_INDEXED_AT_ONCE", 10)
    tokens = [*range(100, 135), 100, 101]
    proposer = NgramProposer()
    proposer.open(sequence(tokens))
    leads = [proposer.leads([sequence(tokens)])[0] for _ in range(5)]
    assert leads == [NO_LEAD, NO_LEAD, NO_LEAD, 2, 2]


def test_a_slot_is_fresh_for_its_next_sequence() -> None:
    proposer = NgramProposer()
    first, second = [1, 2, 3, 1, 2], [4, 1, 2]
    proposer.open(sequence(first))
    assert ask(proposer, first, 1) == [3]
    proposer.close(0)
    proposer.close(0)
    proposer.open(sequence(second))
    assert ask(proposer, second, 1) == []
