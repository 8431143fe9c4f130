"""What a step says of a sequence's drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from toque.engine.sequence import Sequence
from toque.types import SequenceOutput

if TYPE_CHECKING:
    from toque.engine.logprobs import LogprobRows


def accept_draft(
    sequence: Sequence, row: int, tokens: Many[int], logprobs: LogprobRows, output: SequenceOutput
) -> int:
    """Go on from the token of ``row``, which the sequence has taken already, as far as its draft was right.

    Each row after the first was computed with a drafted token and says what follows it. Returns the newest token. An
    answer that ends with a drafted token ends there, and one that cannot go on is left to the next step to say so.
    """
    draft, sequence.draft = sequence.draft, ()
    matcher, newest = sequence.matcher, tokens[row]
    for guess in draft:
        if newest != guess or newest in sequence.stop or (matcher is not None and matcher.complete):
            break
        row += 1
        following = tokens[row]
        if following < 0 or (matcher is not None and not matcher.accept(following)):
            break
        newest = following
        sequence.computed += 1
        sequence.tokens.append(newest)
        output.tokens.append(newest)
        if output.logprobs is not None:
            output.logprobs.append(logprobs.entry(row, sequence.top))
    return newest
