"""From generated ids to the text a client sees: detokenization, then stop strings.

The answer that is not streamed is the same thing pushed at once, so both always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toque.text.detokenizer import Detokenizer
from toque.text.stop import StopScanner
from toque.text.tokenizer import TokenCodec


class Piece(NamedTuple):
    """One token, for logprobs: its bytes, and how many characters of text came before it."""

    token: int
    bytes: bytes
    offset: int

    @property
    def text(self) -> str:
        """The token for people to read; a part of a character shows as U+FFFD."""
        return self.bytes.decode("utf-8", "replace")


@dataclass(slots=True)
class Delta:
    """What one push added. ``text`` may be empty while a character or a possible stop string is incomplete.

    ``pieces`` are the tokens of this push that begin before the stop string, whether or not their text is held back.
    ``used`` counts the ids that were consumed: all of them, or those up to the one that completed the stop.
    """

    text: str = ""
    stopped: bool = False
    pieces: list[Piece] = field(default_factory=list)
    used: int = 0


class TextStream:
    """Guarantees: no delta ends in a part of a character or holds a piece of the stop string that ends the text; text
    is held back only while its tail may become a stop; the deltas add up to the same text however the ids are grouped.
    """

    def __init__(
        self,
        tokenizer: TokenCodec,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """``prompt_tail``: the last ids of the prompt where the answer continues its text (completions); a stop string
        there, or one that begins there, is not a stop."""
        self._codec = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, context=prompt_tail)
        self._scanner = StopScanner(stop, include_stop=include_stop)
        self._length = 0  # characters decoded so far, held back or not
        self._shown = 0  # characters given out

    @property
    def stopped(self) -> bool:
        return self._scanner.matched is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._scanner.matched

    def push(self, ids: Iterable[int]) -> Delta:
        delta = Delta()
        if self.stopped:
            delta.stopped = True
            return delta
        shown: list[str] = []
        scanner = self._scanner
        decode, token_bytes, scan = self._detokenizer.push, self._codec.token_bytes, scanner.push
        for token in ids:
            delta.pieces.append(Piece(token, token_bytes(token), self._length))
            delta.used += 1
            text = decode(token)
            if text:
                self._length += len(text)
                shown.append(scan(text))
                if scanner.matched is not None:
                    delta.stopped = True
                    break
        delta.text = "".join(shown)
        self._shown += len(delta.text)
        if delta.stopped:
            delta.pieces = [piece for piece in delta.pieces if piece.offset < self._shown]
        return delta

    def finish(self) -> Delta:
        """Flush when no more tokens come. A stop string completed by the flush still counts."""
        delta = Delta(stopped=self.stopped)
        if delta.stopped:
            return delta
        delta.text = self._scanner.push(self._detokenizer.finish())
        delta.stopped = self.stopped
        if not delta.stopped:
            delta.text += self._scanner.finish()
        return delta
