"""The asyncio client of one replica process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from toque.errors import ReplicaDiedError, ToqueError, UnavailableError, WireError
from toque.proto.messages import encode_drain, encode_hello
from toque.routing.base import OnRoute, ReplicaState
from toque.routing.carriers import Link, connect
from toque.routing.core import Answer, ClientCore
from toque.types import EngineRequest, EngineStats, ModelCard, SequenceOutput

CONNECT_RETRY_S = 0.02
SILENCE_S = 3.0  # a replica's heartbeat is half a second


class ReplicaSession:
    """One session with the replica at ``address`` (a socket path, or ``grpc+TARGET``). An EngineClient.

    It connects in the background from ``start`` until ``close``, waiting as long as it takes for somebody to listen.
    One session is one process's: once lost it is DEAD for good, and whoever restarts the process makes another.
    ``on_change`` is called, in the event loop, whenever ``state`` or ``reason`` may have changed.

    A request on a replica that goes away fails with UnavailableError if nothing of its answer had arrived (send it
    elsewhere), else with ReplicaDiedError after what had arrived.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        client: str = "gateway",
        silence_s: float = SILENCE_S,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self._client = client
        self._silence_s = silence_s
        self._on_change = on_change
        self._core = ClientCore()
        self._link: Link | None = None
        self._lost: str | None = None
        self._heard = 0.0
        self._reported = self._core.stats
        self._connecting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.on_stats: Callable[[EngineStats], None] | None = None  # called with each report of the replica

    def start(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(
            self._connect(), name=f"connect {self.name}"
        )

    async def close(self) -> None:
        """Ends the session: the replica aborts what is still running in it."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._link is not None:
            self._link.close()
            while self._lost is None:
                await self._next_change()
        else:
            self.lost("the session was closed")

    @property
    def state(self) -> ReplicaState:
        if self._lost is not None:
            return ReplicaState.DEAD
        if self._core.state is ReplicaState.READY and self.silent_s > self._silence_s:
            return ReplicaState.DEGRADED
        return self._core.state

    @property
    def reason(self) -> str:
        if self._lost is not None:
            return self._lost
        if self._link is not None and self.silent_s > self._silence_s:
            return f"the replica has said nothing for {self.silent_s:.0f} s"
        return self._core.reason

    @property
    def silent_s(self) -> float:
        """Seconds since the replica was last heard; 0 while not connected."""
        return time.monotonic() - self._heard if self._link is not None else 0.0

    @property
    def card(self) -> ModelCard | None:
        """The model, once it is loaded."""
        return self._core.card

    @property
    def pid(self) -> int:
        return self._core.pid

    @property
    def in_flight(self) -> int:
        return self._core.open_answers

    def stats(self) -> EngineStats:
        return self._core.stats

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once requests are accepted. Raises UnavailableError with the reason when that is not to be."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state not in (ReplicaState.READY, ReplicaState.DEGRADED):
                    if self.state is not ReplicaState.STARTING:
                        raise UnavailableError(f"replica {self.name} is {self.state}: {self.reason}")
                    await self._next_change()
        except TimeoutError:
            raise UnavailableError(
                f"replica {self.name} was not ready after {timeout_s:g} s: {self.reason}"
            ) from None

    def drain(self, grace_s: float) -> None:
        """Asks the replica to finish what it has within ``grace_s``, take nothing new, and exit."""
        if self._link is not None:
            self._link.send(encode_drain(grace_s))

    def abandon(self, why: str) -> None:
        """Ends every open answer as if the replica had died, and has it abort them when it listens again."""
        if self._link is not None and (abort := self._core.abort_all()):
            self._link.send(abort)
        self._core.fail_all(lambda answer: self._ending(answer, why))

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        if self._link is None or self.state not in (ReplicaState.READY, ReplicaState.DEGRADED):
            raise UnavailableError(f"replica {self.name} is {self.state}: {self.reason}")
        answer = _Stream()
        handle, payload = self._core.submit(request, answer)
        self._link.send(payload)
        try:
            while True:
                if not answer.outputs:
                    if answer.error is not None:
                        raise answer.error
                    await answer.wait()
                    continue
                output = answer.outputs.popleft()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            abort = self._core.release(handle)
            if abort and self._link is not None:
                self._link.send(abort)

    # What the link reports

    def received(self, payload: bytes) -> None:
        self._heard = time.monotonic()
        try:
            changed = self._core.receive(payload)
        except WireError as error:
            self._core.reason = error.message
            if self._link is not None:
                self._link.close()
            return
        if changed:
            self._notify()
        elif self.on_stats is not None and self._core.stats is not self._reported:
            self._reported = self._core.stats
            self.on_stats(self._reported)

    def lost(self, why: str) -> None:
        if self._lost is not None:
            return
        if self._core.state is ReplicaState.DEAD and self._core.reason:
            why = self._core.reason  # it said why before it went
        self._lost = why
        self._link = None
        self._core.fail_all(lambda answer: self._ending(answer, why))
        self._notify()

    def _ending(self, answer: Answer, why: str) -> ToqueError:
        if isinstance(answer, _Stream) and answer.started:
            return ReplicaDiedError(f"replica {self.name} went away in the middle of the answer: {why}")
        return UnavailableError(f"replica {self.name} went away: {why}")

    async def _connect(self) -> None:
        while True:
            try:
                link = await connect(self.address, self)
            except OSError:
                await asyncio.sleep(CONNECT_RETRY_S)
            else:
                break
        self._heard = time.monotonic()
        self._link = link
        link.send(encode_hello(self._client))
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._on_change is not None:
            self._on_change()

    async def _next_change(self) -> None:
        await self._changed.wait()


class _Stream:
    """The outputs that have arrived and are not read yet; at most one reader waits."""

    __slots__ = ("_waiter", "error", "outputs", "started")

    def __init__(self) -> None:
        self.outputs: deque[SequenceOutput] = deque()
        self.error: ToqueError | None = None
        self.started = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: SequenceOutput) -> None:
        self.outputs.append(output)
        self.started = True
        waiter = self._waiter  # as in _wake, without the call: this runs for every token
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: ToqueError) -> None:
        self.error = error
        self._wake()

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
