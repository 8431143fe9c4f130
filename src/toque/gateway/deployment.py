"""A name that clients ask for: what may wait for it, and the versions of a model that answer under it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from toque.errors import ModelNotFoundError, UnavailableError
from toque.gateway.admission import Admission
from toque.gateway.face import Face, Profile
from toque.gateway.faces import FaceLoader, Faces
from toque.gateway.outcomes import Outcomes
from toque.gateway.polling import wait_until
from toque.routing.base import (
    DeploymentSignals,
    EngineClient,
    ReplicaState,
    RoutingTable,
)
from toque.routing.pool import ReplicaPool
from toque.routing.shares import choose_version, point_of
from toque.routing.target import OpenSession, open_session

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import Tokenizer
    from toque.types import ModelCard

_SERVING = (ReplicaState.READY, ReplicaState.DEGRADED)


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
        """The version that answers most requests now; None while its tokenizer is not here."""
        raise NotImplementedError

    @property
    def profile(self) -> Profile | None:
        """What is told of that version; None while nothing of it is known yet."""
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
        if (profile := self.profile) is not None:
            profile.check_embeds(path)

    def check_generates(self, path: str) -> None:
        if (profile := self.profile) is not None:
            profile.check_generates(path)

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

    @property
    def profile(self) -> Profile:
        return self._face.profile

    def choose(self, request_id: str, avoid: Collection[str] = ()) -> Face | None:
        return self._face if self.serving and self._face.key not in avoid else None

    async def face(self, request_id: str = "", avoid: Collection[str] = ()) -> Face:
        await wait_until(lambda: self.client.state is not ReplicaState.STARTING, self.limits.load_wait_s)
        if not self.serving:
            raise unavailable(self)
        return self._face

    async def known_face(self) -> Face:
        return self._face


class FleetDeployment(Deployment):
    """A deployment of the fleet: its versions come and go with the tables that `apply` gets.

    A version takes requests here once its face is loaded and one of its replicas is ready. Requests that come while
    arrivals are held, or nothing runs, wait and are released in the order in which they came. Faces that nobody needs
    are released by `rest`, and read again when the deployment wakes.
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
        self._faces = Faces(name, load, loading, self.pool.of, self.pool.stir)
        self._on_change = on_change
        self._on_wait = on_wait
        self._expected = expected
        self._resting_since: float | None = None
        self._waiting: dict[int, float] = {}  # requests that have no version yet, and since when

    @property
    def table(self) -> RoutingTable:
        return self.pool.table

    def apply(self, table: RoutingTable) -> None:
        rests = not table.held and all(entry.state is ReplicaState.DEAD for entry in table.entries)
        if not rests:
            self._resting_since = None
        elif self._resting_since is None:
            self._resting_since = time.monotonic()
        self._faces.keep(table.versions, needed=not rests)
        self.outcomes.keep(table.versions)
        self.pool.apply(table)

    def rest(self, after_s: float) -> None:
        """Releases the faces of a deployment that has had no replica, and no use of them, for so long."""
        if self._resting_since is None or self.here or self._waiting or self._faces.reading:
            return
        if time.monotonic() - max(self._resting_since, self._left_at, self._faces.used_at) >= after_s:
            self._faces.release()

    def retire(self) -> None:
        """Nothing new is taken; what runs goes on."""
        table = self.table
        entries = tuple(replace(entry, state=ReplicaState.DRAINING) for entry in table.entries)
        self.pool.apply(replace(table, entries=entries, shares={}, held=False, asleep=False))

    def check_possible(self) -> None:
        """UnavailableError when it will not serve as things are: its files, or its replicas, are not to be had."""
        if self._unreadable:
            raise UnavailableError(self._unreadable)
        if self.pool.state is ReplicaState.DEAD:
            raise UnavailableError(f"{self.name} is {self.pool.state}: {self.pool.reason}")

    async def close(self) -> None:
        await self._faces.close()
        await self.pool.close()

    async def until_known(self) -> None:
        """Returns once a face is loaded. ModelError says why none can be."""
        place, until = self.pool.place(), time.monotonic() + self.limits.load_wait_s
        self._faces.recall()
        while not self._faces:
            if self._unreadable and not self._faces.reading:
                raise UnavailableError(f"model {self.name} cannot be read: {self._unreadable}")
            if time.monotonic() >= until:
                raise unavailable(self)
            await self.pool.changed(until, place)

    @property
    def current(self) -> Face | None:
        shares = self.table.shares
        key = max(self._faces, key=lambda key: shares.get(key, 0.0), default=None)
        return None if key is None else self._faces[key]

    @property
    def profile(self) -> Profile | None:
        return self._faces.profile(self.table.shares)

    async def known_face(self) -> Face:
        await self.until_known()
        face = self.current
        assert face is not None
        return face

    async def face(self, request_id: str = "", avoid: Collection[str] = ()) -> Face:
        place, began = self.pool.place(), time.monotonic()
        until = began + self.limits.load_wait_s
        self._waiting[place] = began
        self._faces.recall()
        try:
            if self._on_wait is not None:
                self._on_wait()
            while True:
                if (found := self.choose(request_id, avoid)) is not None:
                    return found
                if not self._hope() or time.monotonic() >= until:
                    raise unavailable(self)
                await self.pool.changed(until, place)
        finally:
            del self._waiting[place]

    @property
    def state(self) -> str:
        if self.table.asleep and not self.pool.in_rotation():
            return "asleep"
        return super().state

    @property
    def reason(self) -> str:
        return self._unreadable or self.table.reason or self.client.reason

    @property
    def listed(self) -> bool:
        return self.profile is not None and (self.serving or self._comes)

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
        return (self.table.asleep or self.table.held) and not self._faces.failed

    @property
    def _unreadable(self) -> str:
        """Why no version's face can be read; "" if one can, or could not yet."""
        return "" if self._faces else next(iter(self._faces.failed.values()), "")

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
        return any(version not in self._faces.failed and self.pool.may_take(version) for version in wanted)

    def _pool_changed(self) -> None:
        self._expected = self._expected or self.ready
        if self._on_change is not None:
            self._on_change()


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
