"""What ``--speculate`` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toque.errors import ConfigError

MOST_DRAFTED = 32  # tokens of a sequence in one step
_NGRAM_DRAFTED = 16
_MODEL_DRAFTED = 5


@dataclass(frozen=True, slots=True)
class Speculation:
    """Up to ``most`` tokens are guessed at once, by the text so far or, with ``draft``, by the model of that path."""

    most: int
    draft: Path | None = None


def parse_speculation(text: str) -> Speculation | None:
    """``off``, ``ngram``, ``ngram:K``, ``draft=PATH`` or ``draft=PATH:K``; None for off. ConfigError for the rest."""
    if text in ("", "off"):
        return None
    head, colon, tail = text.rpartition(":")
    if not colon or not tail.strip().lstrip("+-").isdigit():
        head, tail = text, ""
    if tail and not 1 <= int(tail) <= MOST_DRAFTED:
        raise ConfigError(
            f"speculate drafts between 1 and {MOST_DRAFTED} tokens, got {tail[:20]}", param="speculate"
        )
    if head == "ngram":
        return Speculation(int(tail or _NGRAM_DRAFTED))
    kind, _, path = head.partition("=")
    if kind == "draft" and path:
        return Speculation(int(tail or _MODEL_DRAFTED), Path(path).expanduser())
    raise ConfigError(
        f"speculate is off, ngram, ngram:K or draft=PATH:K, got {text[:60]!r}", param="speculate"
    )
