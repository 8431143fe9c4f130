"""What the library hands out, and how engine outputs become it."""

from __future__ import annotations

from dataclasses import dataclass, field

from toque.text.stream import TextStream
from toque.types import FinishReason, SequenceOutput, TokenLogprob


@dataclass(slots=True)
class CompletionDelta:
    """What one step added to the answer of prompt number ``index``. The last one carries ``finish_reason``.

    ``tokens`` include the one that ended the answer; ``text`` never does. ``prompt_logprobs`` come once, first.
    """

    index: int
    text: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Completion:
    """A whole answer: the fold of its deltas. ``error`` says why when ``finish_reason`` is ERROR."""

    index: int
    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)

    def add(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.cached_tokens += delta.cached_tokens
        self.finish_reason = delta.finish_reason
        self.error = delta.error


class Answer:
    """One request of a call: engine outputs in, deltas out. A stop string ends it before the engine does."""

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self._text = text

    def advance(self, output: SequenceOutput) -> CompletionDelta:
        shown = output.tokens
        if output.stop_token is not None:
            shown = shown[:-1]
        pushed = self._text.push(shown)
        delta = CompletionDelta(
            self.index,
            pushed.text,
            output.tokens,
            output.finish_reason,
            output.logprobs,
            output.prompt_logprobs,
            output.cached_tokens,
            output.error,
        )
        if pushed.stopped:
            # Tokens that came in the same step but after the stop string are not part of the answer.
            delta.tokens = output.tokens[: pushed.used]
            delta.logprobs = None if output.logprobs is None else output.logprobs[: pushed.used]
            delta.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            rest = self._text.finish()
            delta.text += rest.text
            if rest.stopped:
                delta.finish_reason = FinishReason.STOP
        return delta
