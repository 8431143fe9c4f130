"""What one key may use: requests and tokens a minute, requests at once. Decisions only: the clock is passed in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from toque.errors import RateLimitError


@dataclass(frozen=True, slots=True)
class Allowance:
    """The bounds of a key; 0 is none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0


class Bucket:
    """A token bucket that holds a minute's worth. It may go below zero: what was overdrawn is waited for."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        grown = max(0.0, now - self._at) * self.per_minute / 60.0
        self._level = min(float(self.per_minute), self._level + grown)
        self._at = max(self._at, now)
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Also gives back, when negative; never beyond full."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def seconds_until(self, level: float, now: float) -> float:
        return max(0.0, (level - self.level(now)) * 60.0 / self.per_minute)


class Quota:
    """A key's use. A refused request has cost nothing.

    Tokens are charged when a request enters (its prompt's estimate, and ``max_tokens`` where given) and corrected to
    what it used when it ends, so over time exactly the allowance is used. A request larger than a whole minute's
    tokens is let in when the bucket is full: otherwise it never could be.
    """

    def __init__(self, allowance: Allowance, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowance = allowance
        self._clock = clock
        now = clock()
        self._requests = _bucket(allowance.requests_per_minute, now)
        self._tokens = _bucket(allowance.tokens_per_minute, now)
        self.running = 0

    def enter(self, tokens: int) -> Charge:
        """Admit a request of about so many tokens. RateLimitError names the bound and when to come back."""
        now = self._clock()
        most = self.allowance.concurrent_requests
        if most and self.running >= most:
            raise RateLimitError(
                f"this key may have {most} requests at once, and has {self.running}", code="concurrency_limit"
            )
        if self._requests is not None and self._requests.level(now) < 1.0:
            raise RateLimitError(
                f"this key may send {self._requests.per_minute} requests a minute",
                retry_after_s=self._requests.seconds_until(1.0, now),
            )
        if self._tokens is not None:
            needed = float(min(max(1, tokens), self._tokens.per_minute))
            if self._tokens.level(now) < needed:
                raise RateLimitError(
                    f"this key may use {self._tokens.per_minute} tokens a minute; {_whole(self._tokens.level(now))} "
                    f"are left and this request may take {tokens}",
                    retry_after_s=self._tokens.seconds_until(needed, now),
                )
            self._tokens.take(tokens, now)
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.running += 1
        return Charge(self, tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's ``x-ratelimit-*`` for the bounds that there are."""
        now = self._clock()
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                reset = duration(bucket.seconds_until(bucket.per_minute, now))
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + name, b"%d" % _whole(bucket.level(now))),
                    (b"x-ratelimit-reset-" + name, reset.encode()),
                ]
        return found

    def settle(self, tokens: int) -> None:
        self.running -= 1
        if self._tokens is not None and tokens:
            self._tokens.take(tokens, self._clock())


class Charge:
    """One admitted request; `close` it once, with the tokens that it used."""

    def __init__(self, quota: Quota, tokens: int) -> None:
        self._quota = quota
        self._charged = tokens
        self._open = True

    def close(self, used: int) -> None:
        if self._open:
            self._open = False
            self._quota.settle(used - self._charged)


def _bucket(per_minute: int, now: float) -> Bucket | None:
    return Bucket(per_minute, now) if per_minute else None


def _whole(level: float) -> int:
    return max(0, math.floor(level))


def duration(seconds: float) -> str:
    """As OpenAI writes times: ``17ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"
