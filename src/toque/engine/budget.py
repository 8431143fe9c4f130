"""How many tokens a step may hold so that nobody's stream stutters."""

from __future__ import annotations

_SMOOTHING = 0.3  # weight of the newest observation
_OUTLIER = (
    3.0  # an observation counts for at most this multiple of what was expected, and at least its inverse
)
_STEP_STREAMS = (
    4  # what a step costs however few decode, in streams: about that on a CPU, more on other devices
)
_LEAST_SHARE = 0.25  # of a decode step's time that prefill gets even when decoding alone misses the target
_LEAST_CHUNK = 16  # tokens
_LEAST_REST = 0.1  # of a first step's time that goes to what is unknown
_UNMEASURED_CHUNK = 256
_QUIET_FACTOR = (
    10.0  # without streams a step may take this many targets: new arrivals and aborts wait for its end
)


class StepBudget:
    """A cost model fed with past steps: seconds = (4 + streams) x seconds per stream + prefill x seconds per token.

    While anything decodes, a step gets as many prefill tokens as keep it under ``target_s``. Both numbers follow the
    measurements (contexts grow, neighbours come and go), and a wrong one corrects itself: whatever the split between
    them, the budget settles where the measured step takes the target.
    """

    __slots__ = ("_per_stream_s", "_per_token_s", "max_tokens", "target_s")

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._per_stream_s = 0.0
        self._per_token_s = 0.0

    def prefill_tokens(self, decoding: int) -> int:
        """How many tokens beyond one for each of the ``decoding`` sequences the next step may hold."""
        room = self.max_tokens - decoding
        per_token = self._per_token_s
        if decoding:
            if per_token == 0.0:
                return min(room, _UNMEASURED_CHUNK)
            decode_s = self._decode_s(decoding)
            seconds = max(self.target_s - decode_s, _LEAST_SHARE * decode_s)
        else:
            if per_token == 0.0:
                return room
            seconds = _QUIET_FACTOR * self.target_s
        return min(room, max(_LEAST_CHUNK, int(seconds / per_token)))

    def observe(self, decoding: int, prefill: int, seconds: float) -> None:
        """A step of so many decoding sequences and so many prefill tokens took so long."""
        streams, tokens = self._decode_s(decoding), prefill * self._per_token_s
        first_stream, first_token = decoding > 0 and streams == 0.0, prefill > 0 and tokens == 0.0
        if first_stream or first_token:
            # What is unknown took the rest of the time; where all is unknown, each took half.
            rest = max(seconds - streams - tokens, _LEAST_REST * seconds)
            if first_stream and first_token:
                rest /= 2.0
            if first_stream:
                self._per_stream_s = rest / (_STEP_STREAMS + decoding)
            if first_token:
                self._per_token_s = rest / prefill
            return
        expected = streams + tokens
        if expected == 0.0:
            return
        # Normalized least mean squares: the larger part of a step learns more from its error. A few tokens (the rest
        # of a cached prompt) say little about prefill.
        error = min(max(seconds / expected, 1.0 / _OUTLIER), _OUTLIER) - 1.0
        gain = _SMOOTHING * error * expected / (streams * streams + tokens * tokens)
        self._per_stream_s *= 1.0 + gain * streams
        self._per_token_s *= 1.0 + gain * tokens

    def _decode_s(self, decoding: int) -> float:
        """A step of so many streams and nothing else."""
        return (_STEP_STREAMS + decoding) * self._per_stream_s
