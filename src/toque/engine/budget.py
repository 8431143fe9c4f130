"""How many tokens a step may hold so that nobody's stream stutters."""

from __future__ import annotations

_SMOOTHING = 0.3  # weight of the newest observation
_OUTLIER = (
    3.0  # an observation counts for at most this multiple of what was expected, and at least its inverse
)
_LEAST_SHARE = 0.25  # of a decode step's time that prefill gets even when decoding alone misses the target
_LEAST_CHUNK = 16  # tokens
_EVIDENCE = 32  # prefill tokens from which a step counts fully
_UNMEASURED_CHUNK = 256
_QUIET_FACTOR = (
    10.0  # without streams a step may take this many targets: new arrivals and aborts wait for its end
)


class StepBudget:
    """A cost model fed with past steps: seconds = a decode step's own time + prefill tokens x seconds per token.

    While anything decodes, a step gets as many prefill tokens as keep it under ``target_s``. Both numbers follow the
    measurements (contexts grow, neighbours come and go), and a wrong one corrects itself: whatever the split between
    them, the budget settles where the measured step takes the target.
    """

    __slots__ = ("_decode_s", "_per_token_s", "max_tokens", "target_s")

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._decode_s = 0.0
        self._per_token_s = 0.0

    def prefill_tokens(self, decoding: int) -> int:
        """How many tokens beyond one for each of the ``decoding`` sequences the next step may hold."""
        room = self.max_tokens - decoding
        per_token = self._per_token_s
        if decoding:
            if per_token == 0.0:
                return min(room, _UNMEASURED_CHUNK)
            seconds = max(self.target_s - self._decode_s, _LEAST_SHARE * self._decode_s)
        else:
            if per_token == 0.0:
                return room
            seconds = _QUIET_FACTOR * self.target_s
        return min(room, max(_LEAST_CHUNK, int(seconds / per_token)))

    def observe(self, decoding: int, prefill: int, seconds: float) -> None:
        """A step of so many decoding sequences and so many prefill tokens took so long."""
        if prefill == 0:
            if decoding:
                self._decode_s = _follow(self._decode_s, seconds)
            return
        # A few tokens (the rest of a cached prompt) cost little beyond the step itself and say little about prefill.
        evidence = min(1.0, prefill / _EVIDENCE)
        beyond = seconds - self._decode_s if self._per_token_s else seconds
        self._per_token_s = _follow(self._per_token_s, beyond / prefill, _SMOOTHING * evidence)


def _follow(estimate: float, observed: float, smoothing: float = _SMOOTHING) -> float:
    if estimate == 0.0:
        return observed
    bounded = min(max(observed, estimate / _OUTLIER), _OUTLIER * estimate)
    return estimate + smoothing * (bounded - estimate)
