"""Logprobs in OpenAI's two shapes: chat's list of entries, completions' parallel lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toque.text.stream import Piece, TextStream
from toque.types import TokenLogprob

if TYPE_CHECKING:
    from toque.text.tokenizer import Tokenizer

# JSON has no infinity; a token that was masked away shows as this.
FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR


def spell(data: bytes) -> str:
    """A token's text; where it holds a part of a character, its bytes, as OpenAI writes them."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(entry.token, entry.logprob, tokenizer),
                "top_logprobs": [_entry(token, logprob, tokenizer) for token, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": spell(data), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """One choice's logprobs, in as many pieces as they come.

    ``prompt`` holds the echoed prompt's ids (its first token has no logprob, and so no entry of its own) and
    ``echo_chars`` its length: generated tokens are counted on from there.
    """

    def __init__(
        self, tokenizer: Tokenizer, alternatives: int, prompt: Sequence[int], echo_chars: int
    ) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._prompt = prompt
        self._echo_chars = echo_chars

    def render(
        self,
        prompt: Sequence[TokenLogprob | None] | None,
        pieces: Sequence[Piece],
        generated: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any]:
        entries: list[TokenLogprob | None] = [*(prompt or ()), *(generated or ())]
        before = TextStream(self._tokenizer).push(self._prompt).pieces if prompt else []
        return {
            "tokens": [spell(piece.bytes) for piece in (*before, *pieces)],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries]
            if self._alternatives
            else None,
            "text_offset": [piece.offset for piece in before]
            + [piece.offset + self._echo_chars for piece in pieces],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives by text, and the token itself when it is not one of them."""
        texts: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            texts.setdefault(spell(self._tokenizer.token_bytes(token)), finite(logprob))
        return texts
