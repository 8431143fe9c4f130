"""What an answer's text consists of: reasoning, content, tool calls. Told apart while it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toque.text.byte_alphabet import ByteCoding
from toque.text.reasoning import ReasoningParser
from toque.text.tools.base import TextDelta, ToolDelta, ToolParser

if TYPE_CHECKING:
    from toque.text.tokenizer import TokenCodec


@dataclass(slots=True)
class Parts:
    """What some text added to each part of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


class AnswerReader:
    """Reads one choice. The sums of the parts do not depend on how the text was cut into pieces."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.tokens

    @property
    def called(self) -> bool:
        """A call is whole."""
        return self._tools is not None and self._tools.completed > 0

    @property
    def over(self) -> bool:
        """Nothing that could follow would be shown."""
        return self._tools is not None and self._tools.done

    def push(self, text: str, parts: Parts) -> None:
        """One token's text."""
        if self._reasoning is not None:
            thought = self._reasoning.push(text)
            parts.reasoning += thought.reasoning
            text = thought.content
        if text:
            self._content(text, parts)

    def finish(self, parts: Parts) -> None:
        if self._reasoning is not None:
            thought = self._reasoning.finish()
            parts.reasoning += thought.reasoning
            self._content(thought.content, parts)
        if self._tools is not None:
            self._sort(self._tools.finish(), parts)

    def _content(self, text: str, parts: Parts) -> None:
        if self._tools is None:
            parts.content += text
        elif text:
            self._sort(self._tools.push(text), parts)

    @staticmethod
    def _sort(deltas: Sequence[TextDelta | ToolDelta], parts: Parts) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                parts.content += delta.text
            else:
                parts.calls.append(delta)


class ShowingTags:
    """A tokenizer that shows some of its special tokens: those that a reader of the text needs to see."""

    def __init__(self, codec: TokenCodec, shown: frozenset[int]) -> None:
        self._codec = codec
        self._shown = shown
        self.coding: ByteCoding = codec.coding
        self.strip_first_space: bool = codec.strip_first_space
        self.token_bytes = codec.token_bytes
        self.fallback_byte = codec.fallback_byte

    def is_special(self, token: int) -> bool:
        return token not in self._shown and self._codec.is_special(token)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._codec.decode(ids, skip_special=skip_special)
