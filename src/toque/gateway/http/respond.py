"""From a request to its answer: admission, preparation, generation; streamed, or folded into one body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from toque.errors import DeadlineError, EngineError, VersionGoneError
from toque.gateway.deployment import Deployment
from toque.gateway.face import Face
from toque.gateway.gateway import Gateway
from toque.gateway.generation import ChoiceDelta, Generation
from toque.gateway.http.body import ClientLeft
from toque.gateway.http.exchange import MODEL_VERSION, WAITING, Exchange
from toque.gateway.http.metered import check_budget, metered
from toque.gateway.outcomes import Pace
from toque.gateway.prepare import prepare, prompt_size
from toque.gateway.requests import GenerationRequest, PreparedRequest, Usage
from toque.text.stream import Piece
from toque.types import TokenLogprob

if TYPE_CHECKING:
    from toque.gateway.admission import Ticket
    from toque.monitor.metering import Meter

# A client that hears nothing for long gives up, so a request that waits for its turn says so from time to time.
KEEP_ALIVE_S = 10.0


@dataclass(slots=True)
class FoldedCall:
    """The whole of one tool call."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FoldedChoice:
    """The whole of one choice: its deltas, joined."""

    index: int
    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[FoldedCall] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs:
            self.pieces += delta.pieces
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.finish_word is not None:
            self.finish_reason = delta.finish_word
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(FoldedCall(call.id or "", call.name))
            self.calls[call.index].arguments.append(call.arguments)


class AnswerFormat(Protocol):
    """How one API spells an answer. Chat, completions and what comes later each have one."""

    def events(self, deltas: list[ChoiceDelta]) -> bytes:
        """Server-sent events for what is new; b"" when there is nothing to say."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events that end a stream."""
        ...

    def body(self, choices: list[FoldedChoice], usage: Usage) -> bytes: ...


class FormatFactory(Protocol):
    def __call__(self, prepared: PreparedRequest, face: Face) -> AnswerFormat: ...


async def respond(
    exchange: Exchange,
    gateway: Gateway,
    deployment: Deployment,
    request: GenerationRequest,
    spell: FormatFactory,
) -> None:
    """Answer a checked request. The engine's work ends within a moment of the client's leaving, however it ends."""
    exchange.model = deployment.name
    timeout = request.timeout_s or deployment.limits.request_timeout_s
    estimate = sum(prompt_size(prompt) for prompt in request.prompts) * request.n // 4
    check_budget(exchange, gateway)
    charge = exchange.charge(estimate + request.choices * (request.sampling.max_tokens or 0))
    usage = Usage()
    try:
        ticket = deployment.admission.enter(
            request.choices, estimate, deployment.client.stats(), request.tenant
        )
    except BaseException:
        charge.close(0)
        raise
    waiting = _Patience(exchange, deployment) if request.stream else None
    try:
        with (
            deployment.visit(),
            metered(exchange, gateway, deployment, request) as record,
            cancelled_when_client_leaves(exchange),
        ):
            async with asyncio.timeout(timeout):
                call = _Call(exchange, gateway, deployment, request, spell, record, ticket, usage, waiting)
                while not await call.attempt():
                    pass
    except TimeoutError:
        raise DeadlineError(f"the request did not finish within {timeout:g} s", param="timeout") from None
    finally:
        if waiting is not None:
            waiting.over()
        ticket.release()
        charge.close(usage.prompt_tokens + usage.completion_tokens)


@dataclass(slots=True)
class _Call:
    """One admitted request, until a version has answered it. ``avoid`` are those that have failed it."""

    exchange: Exchange
    gateway: Gateway
    deployment: Deployment
    request: GenerationRequest
    spell: FormatFactory
    record: Meter
    ticket: Ticket
    usage: Usage
    waiting: _Patience | None
    avoid: set[str] = field(default_factory=set)

    async def attempt(self) -> bool:
        """Have one version answer. False: it went away, or failed, before anything had begun, and another may."""
        deployment = self.deployment
        face, prepared = await self._prepared()
        face.check_generates(self.exchange.endpoint)
        say_version(self.exchange, face.version)
        self.record.served_by(face.version)
        self.ticket.measured(prepared.prompt_tokens * self.request.n)
        self.record.prepared(prepared.prompt_tokens)
        elsewhere = deployment.choose("", {*self.avoid, face.key}) is not None
        pace = Pace()
        try:
            with deployment.outcomes.attempt(face.key, pace):
                generation = Generation(prepared, face, self.record, self.ticket, self.usage, pace, elsewhere)
                answer = self.spell(prepared, face)
                async with aclosing(generation.deltas()) as deltas:
                    if self.waiting is not None:
                        await _stream(self.exchange, deltas, answer, generation, self.waiting)
                    else:
                        await _whole(self.exchange, deltas, answer, generation)
        except VersionGoneError:
            if pace.started:
                raise
            return False
        except EngineError:
            if pace.started or not elsewhere:
                raise
            self.avoid.add(face.key)
            return False
        return True

    async def _prepared(self) -> tuple[Face, PreparedRequest]:
        """The version that answers, and the request for it. What is wrong with it is said before it has to wait."""
        name, deployment, pool = self.request.request_id, self.deployment, self.gateway.pool
        now = deployment.choose(name, self.avoid)
        known = now or deployment.current
        prepared = None if known is None else await prepare(self.request, known, pool)
        face = now or await deployment.face(name, self.avoid)
        if prepared is None or face is not known:
            prepared = await prepare(self.request, face, pool)
        return face, prepared


def say_version(exchange: Exchange, version: str) -> None:
    """The header that every answer has. In one that has begun with waiting comments it is what was expected then."""
    if not exchange.started:
        kept = [header for header in exchange.added if header[0] != MODEL_VERSION]
        exchange.added[:] = [*kept, (MODEL_VERSION, version.encode("latin-1", "replace"))]


async def _stream(
    exchange: Exchange,
    deltas: AsyncGenerator[list[ChoiceDelta], None],
    answer: AnswerFormat,
    generation: Generation,
    waiting: _Patience,
) -> None:
    """Headers leave with the first output, so that what fails before it still gets its own status."""
    async for batch in deltas:
        data = answer.events(batch)
        if not exchange.started:
            await exchange.start_events()
        waiting.over()
        if data:
            await exchange.write(data)
    now = time.perf_counter()
    generation.pace.completed = True
    generation.record.completed(now)
    await exchange.finish(answer.closing(generation.usage))


async def _whole(
    exchange: Exchange,
    deltas: AsyncGenerator[list[ChoiceDelta], None],
    answer: AnswerFormat,
    generation: Generation,
) -> None:
    choices = [FoldedChoice(sequence.index) for sequence in generation.prepared.sequences]
    async for batch in deltas:
        for delta in batch:
            choices[delta.index].add(delta)
    body = answer.body(choices, generation.usage)
    generation.pace.completed = True
    generation.record.completed(time.perf_counter())
    await exchange.answer(200, body)


class _Patience:
    """Keeps a stream's connection alive with comments until its first token."""

    def __init__(self, exchange: Exchange, deployment: Deployment) -> None:
        self._exchange = exchange
        self._deployment = deployment
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(
            KEEP_ALIVE_S, self._begin
        )

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        if not self._exchange.started:
            if (profile := self._deployment.profile) is not None and all(
                name != MODEL_VERSION for name, _ in self._exchange.added
            ):
                say_version(self._exchange, profile.version)
            await self._exchange.start_events()
        while True:
            await self._exchange.write(WAITING)
            await asyncio.sleep(KEEP_ALIVE_S)

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None


@contextmanager
def cancelled_when_client_leaves(exchange: Exchange) -> Iterator[None]:
    """Inside, this task is cancelled as soon as the connection is gone; that comes out as ClientLeft."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        watcher.cancel()
