"""Merges of a SentencePiece BPE vocabulary, recovered from its scores.

SentencePiece stores no merge list: it joins the two neighbours whose joined piece has the best score. A merge list with
one entry per way to cut a piece into two pieces, ordered by the piece's score, gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby


def merges_by_score(vocab: Mapping[str, int], scored: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Merges for the pieces of ``scored`` (piece, score), best first.

    Pieces of equal score are ordered by the length of the left part, then of the right part, longest first, then as
    they came: the order in which Hugging Face's converters write them.
    """
    merges: list[tuple[str, str]] = []
    best_first = sorted(scored, key=lambda entry: -entry[1])
    for _, group in groupby(best_first, key=lambda entry: entry[1]):
        pairs = [
            (piece[:cut], piece[cut:])
            for piece, _ in group
            for cut in range(len(piece) - 1, 0, -1)
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges.extend(pairs)
    return merges
