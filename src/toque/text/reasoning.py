"""Telling a model's reasoning, ``<think>…</think>``, from its answer while both arrive."""

from __future__ import annotations

from dataclasses import dataclass

from toque.text.tools.base import held

OPEN, CLOSE = "<think>", "</think>"
_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Thought:
    """What one push added to either. Tags, and the blanks next to them, are in neither."""

    reasoning: str = ""
    content: str = ""


def opens_thought(prompt: str, continued: str | None = None) -> bool:
    """Whether the answer to a rendered prompt begins inside the reasoning.

    ``continued`` is the begun answer that the prompt ends with, if it is one to continue.
    """
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser:
    """Push each token's text by itself: then ``tokens`` counts those of the reasoning, its tags included.

    Reasoning is what stands between the tags at the very beginning of an answer; ``opened`` says that the prompt ended
    with the opening tag, so that the answer begins inside. An answer that ends without the closing tag is reasoning
    whole. However the text is cut into pieces, the sums are the same.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self.tokens = 0
        self._held = ""
        self._state = "thinking" if opened else "start"
        self._fresh = opened  # nothing of the reasoning has been shown: blanks are dropped

    @property
    def over(self) -> bool:
        """Everything from now on is content."""
        return self._state == "content"

    def push(self, text: str) -> Thought:
        if self._state == "content":
            return Thought(content=text)
        self.tokens += self._state != "closed"
        return self._read(text, last=False)

    def finish(self) -> Thought:
        return Thought() if self._state == "content" else self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> Thought:
        self._held += text
        if self._state == "start":
            rest = self._held.lstrip(_BLANK)
            if rest.startswith(OPEN):
                self._state, self._fresh, self._held = "thinking", True, rest[len(OPEN) :]
            elif last or (rest and not OPEN.startswith(rest)):
                self._state, self.tokens = "content", 0
                return Thought(content=self._release())
            else:
                return Thought()
        reasoning = ""
        if self._state == "thinking":
            end = self._held.find(CLOSE)
            if end < 0:
                return Thought(self._think(last))
            reasoning = self._trim(self._held[:end]).rstrip(_BLANK)
            self._held = self._held[end + len(CLOSE) :]
            self._state = "closed"
        # Blanks between the tag and the answer belong to neither.
        rest = self._held.lstrip(_BLANK)
        if not rest and not last:
            self._held = ""
            return Thought(reasoning)
        self._held, self._state = rest, "content"
        return Thought(reasoning, self._release())

    def _think(self, last: bool) -> str:
        keep = 0
        if not last:
            keep = held(self._held, (CLOSE,))
            # Blanks before what may be the tag wait with it.
            keep = len(self._held) - len(self._held[: len(self._held) - keep].rstrip(_BLANK))
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return self._trim(shown)

    def _trim(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip(_BLANK)
            self._fresh = not text
        return text

    def _release(self) -> str:
        released, self._held = self._held, ""
        return released
