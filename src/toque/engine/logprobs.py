"""Logprob entries from the arrays of a step."""

from __future__ import annotations

import math

from toque.backends.base import StepResult
from toque.errors import EngineError
from toque.types import TokenLogprob

LOWEST = -9999.0  # reported instead of minus infinity, which JSON cannot say


class LogprobRows:
    """The logprob rows of one step, converted to Python numbers once and only when somebody asks."""

    __slots__ = ("_ids", "_logprobs", "_result", "_tokens", "_top")

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._logprobs: list[float] | None = None
        self._tokens: list[int] = []
        self._ids: list[list[int]] = []
        self._top: list[list[float]] = []

    def entry(self, row: int, top: int) -> TokenLogprob:
        """The token of a row with its logprob and its ``top`` best alternatives, best first."""
        logprobs = self._logprobs
        if logprobs is None:
            logprobs = self._convert()
        best: tuple[tuple[int, float], ...] = ()
        if top > 0 and self._ids:
            pairs = zip(self._ids[row][:top], self._top[row][:top], strict=True)
            best = tuple((token, logprob) for token, logprob in pairs if math.isfinite(logprob))
        return TokenLogprob(self._tokens[row], max(logprobs[row], LOWEST), best)

    def _convert(self) -> list[float]:
        result = self._result
        if result.logprobs is None:
            raise EngineError("the executable returned no logprobs although a row asked for them")
        self._logprobs = result.logprobs.tolist()
        self._tokens = result.tokens.tolist()
        if result.top_ids is not None and result.top_logprobs is not None:
            self._ids = result.top_ids.tolist()
            self._top = result.top_logprobs.tolist()
        return self._logprobs
