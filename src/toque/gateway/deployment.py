"""A name that clients ask for: what may wait for it, and the versions of a model that answer under it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from toque.errors import ModelNotFoundError, ToqueError, UnavailableError
from toque.gateway.admission import Admission
from toque.gateway.face import Face
from toque.gateway.outcomes import Outcomes
from toque.gateway.polling import wait_until
from toque.routing.base import (
    DeploymentSignals,
    EngineClient,
    ReplicaState,
    RoutingTable,
    ServedVersion,
)
from toque.routing.pool import ReplicaPool
from toque.routing.shares import choose_version, point_of
from toque.routing.target import OpenSession, open_session

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import Tokenizer
    from toque.types import ModelCard

log = logging.getLogger("toque.gateway")

_SERVING = (ReplicaState.READY, ReplicaState.DEGRADED)
_RECHECK_S = 0.5


class Deployment:
    """What the gateway's handlers see of a deployment. `face` gives a request the version that answers it.

    ``client`` is all engines behind the name together: its state, its numbers.
    """

    def __init__(self, name: str, client: EngineClient, limits: LimitSettings) -> None:
        self.name = name
        self.client = client
        self.limits = limits
        self.admission = Admission(limits.max_queued_requests, limits.max_queued_tokens)
        self.outcomes = Outcomes()
        self.here = 0  # requests between their admission and their end
        self._left_at = time.monotonic()

    @property
    def current(self) -> Face | None:
        """The version that answers most requests now; None while nothing of it is known yet."""
        raise NotImplementedError

    async def face(self, request_id: str = "", avoid: Collection[str] = ()) -> Face:
        """As `choose`, but waits within the limit for a version that loads, wakes, or takes over.

        UnavailableError: none is to come, or none came.
        """
        raise NotImplementedError

    async def known_face(self) -> Face:
        """A version whose tokenizer can be used, whether or not any replica runs."""
        raise NotImplementedError

    def choose(self, request_id: str, avoid: Collection[str] = ()) -> Face | None:
        """The version that answers this request; None where it has to wait for one. ``avoid``: not these."""
        raise NotImplementedError

    @property
    def state(self) -> str:
        """A ReplicaState's value, the best of any replica; or "asleep": the next request starts one."""
        return self.client.state.value

    @property
    def reason(self) -> str:
        return self.client.reason

    @property
    def serving(self) -> bool:
        """Requests are answered without anything else having to happen."""
        return self.client.state in _SERVING

    @property
    def listed(self) -> bool:
        """Clients may ask for it: it serves, or will for whoever asks."""
        return self.serving

    @property
    def ready(self) -> bool:
        return self.client.state is ReplicaState.READY

    @property
    def expected(self) -> bool:
        """Whether the gateway is not ready without it."""
        return True

    def check_embeds(self, path: str) -> None:
        """RequestError when it is known that it does not; the face that answers is checked again."""
        if (face := self.current) is not None:
            face.check_embeds(path)

    def check_generates(self, path: str) -> None:
        if (face := self.current) is not None:
            face.check_generates(path)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """A request is here, from its admission to its end."""
        self.here += 1
        try:
            yield
        finally:
            self.here -= 1
            self._left_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Since the last request was here; 0 while one is."""
        return 0.0 if self.here else time.monotonic() - self._left_at


class FixedDeployment(Deployment):
    """One version, whose engines somebody else looks after."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        card: ModelCard,
        limits: LimitSettings,
        tool_parser: str = "",
    ) -> None:
        super().__init__(name, client, limits)
        self._face = Face(name, client, tokenizer, template, card, limits, tool_parser)

    @property
    def current(self) -> Face:
        return self._face

    def choose(self, request_id: str, avoid: Collection[str] = ()) -> Face | None:
        return self._face if self.serving and self._face.key not in avoid else None

    async def face(self, request_id: str = "", avoid: Collection[str] = ()) -> Face:
        await wait_until(lambda: self.client.state is not ReplicaState.STARTING, self.limits.load_wait_s)
        if not self.serving:
            raise unavailable(self)
        return self._face

    async def known_face(self) -> Face:
        return self._face


class FaceLoader(Protocol):
    """Called in a thread. Raises ModelError."""

    def __call__(self, name: str, version: ServedVersion, client: EngineClient) -> Face: ...


class FleetDeployment(Deployment):
    """A deployment of the fleet: its versions come and go with the tables that `apply` gets.

    A version takes requests here once its face is loaded and one of its replicas is ready. Requests that come while
    arrivals are held, or nothing runs, wait and are released in the order in which they came.
    """

    def __init__(
        self,
        name: str,
        limits: LimitSettings,
        load: FaceLoader,
        loading: Executor,
        *,
        open_session: OpenSession = open_session,
        hedge_after_s: float = 0.0,
        expected: bool = True,
        on_change: Callable[[], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """``loading`` runs ``load``. ``expected``: it was there when the gateway started. ``on_wait`` hears of each
        request that begins to wait."""
        self.pool = ReplicaPool(
            name,
            wait_s=limits.load_wait_s,
            max_waiting=limits.max_queued_requests,
            open_session=open_session,
            hedge_after_s=hedge_after_s,
            on_change=self._pool_changed,
            on_wait=on_wait,
        )
        super().__init__(name, self.pool, limits)
        self._load = load
        self._loading = loading
        self._on_change = on_change
        self._on_wait = on_wait
        self._expected = expected
        self._faces: dict[str, Face] = {}
        self._failed: dict[str, str] = {}  # versions whose face cannot be loaded, and why
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[int, float] = {}  # requests that have no version yet, and since when
        self._arrivals = 0

    @property
    def table(self) -> RoutingTable:
        return self.pool.table

    def apply(self, table: RoutingTable) -> None:
        for key in [key for key in self._faces if key not in table.versions]:
            del self._faces[key]
        for key in [key for key in self._failed if key not in table.versions]:
            del self._failed[key]
        for key, version in table.versions.items():
            if key not in self._faces and key not in self._failed and key not in self._tasks:
                self._tasks[key] = asyncio.get_running_loop().create_task(self._learn(version))
        self.outcomes.keep({*table.versions, *self._faces})
        self.pool.apply(table)

    def retire(self) -> None:
        """Nothing new is taken; what runs goes on."""
        table = self.table
        entries = tuple(replace(entry, state=ReplicaState.DRAINING) for entry in table.entries)
        self.pool.apply(replace(table, entries=entries, shares={}, held=False, asleep=False))

    def check_possible(self) -> None:
        """UnavailableError when it will not serve as things are: its files, or its replicas, are not to be had."""
        if self._failed and not self._faces:
            raise UnavailableError(next(iter(self._failed.values())))
        if self.pool.state is ReplicaState.DEAD:
            raise UnavailableError(f"{self.name} is {self.pool.state}: {self.pool.reason}")

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.pool.close()

    async def until_known(self) -> None:
        """Returns once a face is loaded. ModelError says why none can be."""
        until = time.monotonic() + self.limits.load_wait_s
        while not self._faces:
            if self._failed:
                raise UnavailableError(
                    f"model {self.name} cannot be read: {next(iter(self._failed.values()))}"
                )
            if time.monotonic() >= until:
                raise unavailable(self)
            await self.pool.changed(time.monotonic() + _RECHECK_S)

    @property
    def current(self) -> Face | None:
        shares = self.table.shares
        return max(self._faces.values(), key=lambda face: shares.get(face.key, 0.0), default=None)

    async def known_face(self) -> Face:
        await self.until_known()
        face = self.current
        assert face is not None
        return face

    async def face(self, request_id: str = "", avoid: Collection[str] = ()) -> Face:
        self._arrivals += 1
        number, began = self._arrivals, time.monotonic()
        until = began + self.limits.load_wait_s
        self._waiting[number] = began
        try:
            if self._on_wait is not None:
                self._on_wait()
            while True:
                if (found := self.choose(request_id, avoid)) is not None:
                    return found
                if not self._hope() or time.monotonic() >= until:
                    raise unavailable(self)
                await self.pool.changed(min(until, time.monotonic() + _RECHECK_S))
        finally:
            del self._waiting[number]

    @property
    def state(self) -> str:
        if self.table.asleep and not self.pool.in_rotation():
            return "asleep"
        return super().state

    @property
    def reason(self) -> str:
        if self._failed and not self._faces:
            return next(iter(self._failed.values()))
        return self.table.reason or self.client.reason

    @property
    def listed(self) -> bool:
        return self.current is not None and (self.serving or self._comes)

    @property
    def ready(self) -> bool:
        return (self.client.state is ReplicaState.READY and bool(self._faces)) or self._comes

    @property
    def expected(self) -> bool:
        """What was added to a gateway that runs counts once it has been ready; what is switched off does not."""
        table = self.table
        return self._expected and (bool(table.shares) or bool(table.entries) or table.held)

    def signals(self) -> DeploymentSignals:
        """Without the percentiles, which the gateway has."""
        oldest = min(self._waiting.values(), default=None)
        waited = 0.0 if oldest is None else time.monotonic() - oldest
        return DeploymentSignals(
            self.name,
            waiting=len(self._waiting) + self.pool.waiting,
            waiting_s=max(waited, self.pool.waiting_s),
            running=self.pool.running,
            idle_s=self.idle_s,
            outcomes=self.outcomes.snapshot(),
            stranded=self.pool.stranded,
        )

    @property
    def _comes(self) -> bool:
        """Whoever asks is answered, after a wait: it is asleep, or arrivals are held for a moment."""
        return (self.table.asleep or self.table.held) and not self._failed

    def choose(self, request_id: str, avoid: Collection[str] = ()) -> Face | None:
        shares = self.table.shares

        def able(version: str) -> bool:
            return version in self._faces and version not in avoid and self.pool.takes(version)

        chosen = choose_version(shares, point_of(request_id), able)
        if chosen is None and any(
            share > 0 and version not in self._faces for version, share in shares.items()
        ):
            # What shall answer is not known here yet: what did so far goes on, if it is still there.
            chosen = next((version for version in self._faces if able(version)), None)
        return None if chosen is None else self._faces[chosen]

    def _hope(self) -> bool:
        wanted = [version for version, share in self.table.shares.items() if share > 0]
        return any(version not in self._failed and self.pool.may_take(version) for version in wanted)

    def _pool_changed(self) -> None:
        self._expected = self._expected or self.ready
        if self._on_change is not None:
            self._on_change()

    async def _learn(self, version: ServedVersion) -> None:
        """Load a version's face, beside the loop."""
        loop = asyncio.get_running_loop()
        client = self.pool.of(version.key)
        try:
            face = await loop.run_in_executor(self._loading, self._load, self.name, version, client)
        except ToqueError as error:
            log.error("model %s: %s", self.name, error.message)
            self._failed[version.key] = error.message
        except Exception as error:
            log.exception("model %s cannot be read", self.name)
            self._failed[version.key] = f"{type(error).__name__}: {error}"
        else:
            if version.key in self.table.versions:
                self._faces[version.key] = face
        finally:
            del self._tasks[version.key]
            self.pool.stir()


def unavailable(deployment: Deployment) -> UnavailableError:
    why = deployment.reason or f"it is {deployment.state}"
    return UnavailableError(f"model {deployment.name} cannot answer now: {why}", retry_after_s=2.0)


def find_deployment(deployments: Mapping[str, Deployment], model: str) -> Deployment:
    """The deployment of exactly this name. Nothing is loaded, and no other model answers, for an unknown one."""
    try:
        return deployments[model]
    except KeyError:
        shown = model if len(model) <= 64 else model[:61] + "..."
        raise ModelNotFoundError(
            f"the model {shown!r} does not exist here; GET /v1/models lists those that do", param="model"
        ) from None
