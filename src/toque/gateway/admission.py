"""How much may wait in front of a deployment. Decisions only: no clock, no I/O."""

from __future__ import annotations

from toque.errors import QueueFullError
from toque.types import EngineStats

MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Bounds the sequences of a deployment that have no first token yet, and their prompt tokens.

    A refused request has started nothing. A single request larger than the token bound is let in when nothing else
    waits: otherwise it could never run, however often it came back.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def enter(self, requests: int, tokens: int, stats: EngineStats) -> Ticket:
        """Admit a request of so many sequences and prompt tokens, or raise QueueFullError saying when to come back."""
        over_requests = self.requests + requests > self.max_requests
        over_tokens = self.tokens + tokens > self.max_tokens
        if self.requests > 0 and (over_requests or over_tokens):
            bound = (
                f"{self.requests} of {self.max_requests} requests"
                if over_requests
                else f"{self.tokens} of {self.max_tokens} prompt tokens"
            )
            raise QueueFullError(
                f"the queue is full: {bound} are waiting; try again later",
                retry_after_s=retry_after(self.tokens, stats.tokens_per_second),
            )
        self.requests += requests
        self.tokens += tokens
        return Ticket(self, requests, tokens)


class Ticket:
    """A request's place in the queue. Sequences leave it one by one; ``release`` gives back whatever is left."""

    def __init__(self, admission: Admission, requests: int, tokens: int) -> None:
        self._admission = admission
        self._requests = requests
        self._tokens = tokens

    def measured(self, tokens: int) -> None:
        """The prompts have been tokenized: the estimate made at the door gives way to the count."""
        self._admission.tokens += tokens - self._tokens
        self._tokens = tokens

    def started(self, tokens: int) -> None:
        """One sequence has its first token (or ended without one)."""
        tokens = min(tokens, self._tokens)
        self._admission.requests -= min(1, self._requests)
        self._admission.tokens -= tokens
        self._requests -= min(1, self._requests)
        self._tokens -= tokens

    def release(self) -> None:
        self._admission.requests -= self._requests
        self._admission.tokens -= self._tokens
        self._requests = self._tokens = 0


def retry_after(queued_tokens: int, tokens_per_second: float) -> float:
    """Seconds until about half of what waits is done, between 1 and 60."""
    if tokens_per_second <= 0:
        return 1.0
    return min(MAX_RETRY_AFTER_S, max(1.0, 0.5 * queued_tokens / tokens_per_second))
