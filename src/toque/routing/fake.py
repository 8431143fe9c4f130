"""An EngineClient that plays a script: what code in front of engines is tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from toque.errors import ToqueError, UnavailableError
from toque.routing.base import OnRoute, ReplicaState
from toque.types import EngineRequest, EngineStats, FinishReason, SequenceOutput, TokenLogprob


@dataclass(frozen=True, slots=True)
class Script:
    """What one request gets.

    ``tokens`` are streamed ``per_step`` at a time with ``delay_s`` between steps, the first after
    ``first_delay_s``; then the answer finishes with ``finish``, unless max_tokens or a stop id ended it before.
    ``error`` is raised instead of the token at index ``fail_at`` (0: before the first output). ``hold`` never
    finishes: it waits after its last token until it is aborted.
    """

    tokens: Sequence[int] = ()
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    per_step: int = 1
    finish: FinishReason = FinishReason.STOP
    error: ToqueError | None = None
    fail_at: int = 0
    cached_tokens: int = 0
    hold: bool = False


@dataclass(slots=True)
class FakeEngineClient:
    """Answers each request with ``script`` (or what ``script`` returns for it, when it is a function).

    Like a real engine it stops at ``max_tokens`` and at ``stop_token_ids`` (after ``min_tokens``), reports
    logprobs when asked for (-1.0 for every token, alternatives descending from it), and frees everything when
    the iterator is closed. ``requests`` holds what was asked for, ``finished`` and ``aborted`` the ids that
    ended either way. Set ``state`` and ``reason`` to play a replica that loads, drains or is gone: nothing
    starts then.
    """

    script: Script | Callable[[EngineRequest], Script] = field(default_factory=Script)
    state: ReplicaState = ReplicaState.READY
    reason: str = ""
    max_sequences: int = 0  # 0: no bound; more wait in arrival order
    requests: list[EngineRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    _room: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        if self.state not in (ReplicaState.READY, ReplicaState.DEGRADED):
            raise UnavailableError(self.reason or f"the replica is {self.state.value}")
        self.requests.append(request)
        script = self.script(request) if callable(self.script) else self.script
        ended = False
        await self._enter()
        try:
            self.prompt_tokens += len(request.prompt)
            async with aclosing(_play(script, request)) as outputs:
                async for output in outputs:
                    self.generated_tokens += len(output.tokens)
                    ended = output.finish_reason is not None
                    yield output
        except ToqueError:
            ended = True
            raise
        finally:
            self.running -= 1
            (self.finished if ended else self.aborted).append(request.request_id)
            if self.max_sequences:
                async with self._room:
                    self._room.notify()

    async def _enter(self) -> None:
        if self.max_sequences:
            self.waiting += 1
            try:
                async with self._room:
                    await self._room.wait_for(lambda: self.running < self.max_sequences)
                    self.running += 1
            finally:
                self.waiting -= 1
        else:
            self.running += 1

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=self.waiting,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
        )


async def _play(script: Script, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
    sampling = request.sampling
    available = len(script.tokens)
    if script.error is not None:
        available = min(available, script.fail_at)
    limit = available if sampling.max_tokens is None else min(available, sampling.max_tokens)
    stops = frozenset(sampling.stop_token_ids)
    produced = len(request.generated)
    first = True
    await asyncio.sleep(script.first_delay_s)
    while True:
        if script.error is not None and produced >= available:
            raise script.error
        output = _output(request, [], first, script)
        for token in script.tokens[produced : min(produced + script.per_step, limit)]:
            output.tokens.append(token)
            produced += 1
            if token in stops and produced > sampling.min_tokens:
                output.finish_reason, output.stop_token = FinishReason.STOP, token
                break
        if request.sampling.logprobs is not None:
            output.logprobs = [_logprob(token, request.sampling.logprobs) for token in output.tokens]
        if output.finish_reason is None:
            if sampling.max_tokens is not None and produced >= sampling.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            elif produced >= available and script.error is None:
                if script.hold:
                    if output.tokens:
                        yield output
                    await asyncio.Event().wait()
                output.finish_reason = script.finish
        yield output
        if output.finish_reason is not None:
            return
        first = False
        await asyncio.sleep(script.delay_s)


def _output(request: EngineRequest, tokens: list[int], first: bool, script: Script) -> SequenceOutput:
    output = SequenceOutput(request.request_id, tokens)
    if first:
        output.cached_tokens = script.cached_tokens
        if request.sampling.prompt_logprobs is not None:
            n = request.sampling.prompt_logprobs
            output.prompt_logprobs = [None, *(_logprob(token, n) for token in request.prompt[1:])]
    return output


def _logprob(token: int, n: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, tuple((token + i, -1.0 - i) for i in range(n)))
