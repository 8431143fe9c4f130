"""An embedding model behind the interface of a generating engine: requests in, one finished output each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from toque.engine.admission import Limits, check_request
from toque.engine.options import EngineOptions
from toque.engine.rate import TokenRate
from toque.errors import DeadlineError, EngineError
from toque.types import EngineRequest, EngineStats, FinishReason, SequenceOutput

if TYPE_CHECKING:
    from toque.engine.embedding import EmbeddingEngine


class EmbeddingSteps:
    """Texts of all requests that wait are embedded together, as many in a step as fit it.

    A request's prompt is one text, its only output the vector. Requests go in the order of priority; tenants take
    turns, each in order of arrival. Used from one thread.
    """

    def __init__(
        self, engine: EmbeddingEngine, options: EngineOptions, clock: Callable[[], float] = time.time
    ) -> None:
        self.engine = engine
        self._options = options
        self._clock = clock
        self.limits = Limits(
            context_length=engine.context_length,
            kv_tokens=engine.context_length,
            vocab_size=engine.vocab_size,
            valid_vocab=engine.vocab_size,
        )
        self._waiting: dict[str, tuple[EngineRequest, float]] = {}  # with the time of arrival
        self._rate = TokenRate()
        self._steps = self._tokens = self._device_us = 0
        self.load_seconds = 0.0
        self._created = clock()
        self._seconds = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError or ContextLengthError for a text that cannot be embedded."""
        if request.request_id in self._waiting:
            raise EngineError(f"request {request.request_id} is already here")
        check_request(request, self.limits)
        self._waiting[request.request_id] = (request, self._clock())

    def abort(self, request_id: str) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def step(self) -> list[SequenceOutput]:
        started = self._clock()
        outputs = self._late(started)
        batch = self._next_batch()
        if not batch:
            return outputs
        arrived = [self._waiting.pop(request.request_id)[1] for request in batch]
        vectors = self.engine.embed([request.prompt for request in batch])
        tokens = sum(len(request.prompt) for request in batch)
        device_us = int(max(0.0, self._clock() - started) * 1e6)
        self._device_us += device_us
        done = given = 0
        for request, at, vector in zip(batch, arrived, vectors, strict=True):
            done += len(
                request.prompt
            )  # each has its part of the step by its tokens, and together they have all
            share = device_us * done // tokens - given
            given += share
            outputs.append(
                SequenceOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.STOP,
                    queue_seconds=max(0.0, started - at),
                    embedding=vector.astype("<f4").tobytes(),
                    device_us=share,
                )
            )
        now = self._clock()
        self._steps += 1
        self._tokens += tokens
        self._seconds += max(0.0, now - started)
        self._rate.add(tokens, now)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            queued_tokens=sum(len(request.prompt) for request, _ in self._waiting.values()),
            steps=self._steps,
            prompt_tokens=self._tokens,
            tokens_per_second=self._rate.per_second(self._clock()),
            step_seconds=self._seconds,
            device_seconds=self._device_us / 1e6,
            load_seconds=self.load_seconds,
            up_seconds=self.load_seconds + max(0.0, self._clock() - self._created),
        )

    def close(self) -> None:
        self.engine.close()

    def _late(self, now: float) -> list[SequenceOutput]:
        late = [r for r, _ in self._waiting.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            del self._waiting[request.request_id]
        return [
            SequenceOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.ERROR,
                error="the deadline passed before the text's turn came",
                error_code=DeadlineError.code,
            )
            for request in late
        ]

    def _next_batch(self) -> list[EngineRequest]:
        if not self._waiting:
            return []
        first = min(request.priority for request, _ in self._waiting.values())
        lines: dict[str, deque[EngineRequest]] = {}
        for request, _ in self._waiting.values():
            if request.priority == first:
                lines.setdefault(request.tenant, deque()).append(request)
        batch: list[EngineRequest] = []
        room = self._options.max_batch_tokens
        turns = deque(lines.values())
        while turns and len(batch) < self._options.max_sequences:
            line = turns.popleft()
            if len(line[0].prompt) > room:
                break  # nothing overtakes it
            batch.append(line.popleft())
            room -= len(batch[-1].prompt)
            if line:
                turns.append(line)
        return batch
