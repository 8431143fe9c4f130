"""Prompt lookup: text that quotes, edits or repeats goes on as it did where its last tokens stood before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

from toque.engine.sequence import Sequence
from toque.engine.speculate.proposer import NO_LEAD

_LEAST_MATCH = 2  # tokens; the index finds nothing shorter
_LONGEST_MATCH = 24  # matches are not told apart beyond
_CANDIDATES = 16  # earlier places looked at, latest first
_INDEXED_AT_ONCE = 8192  # tokens of a long prompt, so that it holds up no step for long
_PATIENCE = 4  # tokens for which a copied passage may disagree before it is given up


class NgramProposer:
    """Finds the longest recent match of the last tokens in prompt and answer, through hash chains as in deflate
    (RFC 1951, section 4): a table of the latest place of every pair of tokens, and for each place the one before it.

    A token costs one table entry once, a guess a bounded number of comparisons. A passage that is being copied is
    followed across single tokens that differ, which no table would find again at once.
    """

    beliefs = (0.2, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9, 0.9)
    free = True
    round_seconds = 0.0

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def open(self, sequence: Sequence) -> None:
        self._texts[sequence.slot] = _Text()

    def close(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def leads(self, sequences: Many[Sequence]) -> list[int]:
        texts = self._texts
        return [texts[sequence.slot].find(sequence.tokens) for sequence in sequences]

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[list[int]]:
        return [
            self._texts[sequence.slot].copy(sequence.tokens, count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def close_all(self) -> None:
        self._texts.clear()


class _Text:
    """One sequence's index. A place is an index into its tokens: that of the token after a match."""

    __slots__ = ("_before", "_disagreed", "_latest", "_source", "_source_at")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # pair of tokens → the last place after it
        self._before = array("i", [-1, -1])  # place → the place before it after the same pair
        self._source = -1  # the place that the text seems to be copied from
        self._source_at = 0  # how many tokens there were when it was found
        self._disagreed = 0  # tokens since the copy last agreed for long

    def find(self, tokens: list[int]) -> int:
        """How many of the last tokens agree with those before the best earlier place; NO_LEAD where there is none."""
        n = len(tokens)
        if n < _LEAST_MATCH or not self._index(tokens, n):
            self._source = -1
            return NO_LEAD
        best, place = -1, -1
        if self._source >= 0:
            place = self._source + n - self._source_at
            best = _match(tokens, place, n)
            self._disagreed = 0 if best >= _LEAST_MATCH else self._disagreed + n - self._source_at
            if self._disagreed > _PATIENCE:
                best, place = -1, -1
        candidate = self._before[n]
        for _ in range(_CANDIDATES):
            if candidate < 0 or best >= _LONGEST_MATCH:
                break
            length = _match(tokens, candidate, n)
            if length > best:
                best, place = length, candidate
                self._disagreed = 0
            candidate = self._before[candidate]
        self._source, self._source_at = place, n
        return best if place >= 0 else NO_LEAD

    def copy(self, tokens: list[int], count: int) -> list[int]:
        """The ``count`` tokens from the source on; where it reaches the end, it goes on with what was copied."""
        source = self._source
        period = len(tokens) - source
        if count <= period:
            return tokens[source : source + count]
        return [tokens[source + i % period] for i in range(count)]

    def _index(self, tokens: list[int], n: int) -> bool:
        """Enter the pairs that are new; False while more are left."""
        before, latest = self._before, self._latest
        begin = len(before)
        end = min(n, begin + _INDEXED_AT_ONCE - 1)
        for place in range(begin, end + 1):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            before.append(latest.get(pair, -1))
            latest[pair] = place
        return end == n


def _match(tokens: list[int], place: int, n: int) -> int:
    """How many tokens before ``place`` equal the last ones."""
    length = 0
    most = min(place, _LONGEST_MATCH)
    while length < most and tokens[place - 1 - length] == tokens[n - 1 - length]:
        length += 1
    return length
