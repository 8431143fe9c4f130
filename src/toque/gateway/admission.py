"""How much may wait in front of a deployment. Decisions only: no clock, no I/O."""

from __future__ import annotations

from toque.errors import QueueFullError
from toque.types import EngineStats

MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Bounds the sequences of a deployment that have no first token yet, and their prompt tokens.

    A refused request has started nothing. A single request larger than the token bound is let in when nothing else
    waits: otherwise it could never run, however often it came back. A queue that others have filled takes a tenant's
    request all the same while the tenant holds less than its part of it, so that a flood shuts out only itself;
    with those, at most twice the bounds wait.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self._held: dict[str, _Held] = {}

    def enter(self, requests: int, tokens: int, stats: EngineStats, tenant: str = "") -> Ticket:
        """Admit a request of so many sequences and prompt tokens, or raise QueueFullError saying when to come back."""
        over_requests = self.requests + requests > self.max_requests
        over_tokens = self.tokens + tokens > self.max_tokens
        held = self._held.get(tenant)
        if (
            self.requests > 0
            and (over_requests or over_tokens)
            and not self._within_share(held, requests, tokens)
        ):
            bound = (
                f"{self.requests} of {self.max_requests} requests"
                if over_requests
                else f"{self.tokens} of {self.max_tokens} prompt tokens"
            )
            raise QueueFullError(
                f"the queue is full: {bound} are waiting; try again later",
                retry_after_s=retry_after(self.tokens, stats.tokens_per_second),
            )
        self._held.setdefault(tenant, _Held())
        self.add(tenant, requests, tokens)
        return Ticket(self, tenant, requests, tokens)

    def add(self, tenant: str, requests: int, tokens: int) -> None:
        """Count what a tenant has more, or less, in the queue."""
        self.requests += requests
        self.tokens += tokens
        held = self._held[tenant]
        held.requests += requests
        held.tokens += tokens
        if held.requests == 0:
            del self._held[tenant]

    def _within_share(self, held: _Held | None, requests: int, tokens: int) -> bool:
        tenants = len(self._held) + (held is None)
        if tenants == 1:
            return False
        mine = held or _Held()
        return (
            mine.requests + requests <= max(1, self.max_requests // tenants)
            and mine.tokens + tokens <= self.max_tokens // tenants
            and self.requests + requests <= 2 * self.max_requests
            and self.tokens + tokens <= 2 * self.max_tokens
        )


class _Held:
    """What one tenant has in the queue."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0


class Ticket:
    """A request's place in the queue. Sequences leave it one by one; ``release`` gives back whatever is left."""

    def __init__(self, admission: Admission, tenant: str, requests: int, tokens: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._requests = requests
        self._tokens = tokens

    def measured(self, tokens: int) -> None:
        """The prompts have been tokenized: the estimate made at the door gives way to the count."""
        self._leave(0, self._tokens - tokens)

    def started(self, tokens: int) -> None:
        """One sequence has its first token (or ended without one)."""
        if self._requests == 1:
            tokens = self._tokens  # the last takes everything with it
        self._leave(min(1, self._requests), min(tokens, self._tokens))

    def release(self) -> None:
        self._leave(self._requests, self._tokens)

    def _leave(self, requests: int, tokens: int) -> None:
        if self._requests:
            self._requests -= requests
            self._tokens -= tokens
            self._admission.add(self._tenant, -requests, -tokens)


def retry_after(queued_tokens: int, tokens_per_second: float) -> float:
    """Seconds until about half of what waits is done, between 1 and 60."""
    if tokens_per_second <= 0:
        return 1.0
    return min(MAX_RETRY_AFTER_S, max(1.0, 0.5 * queued_tokens / tokens_per_second))
