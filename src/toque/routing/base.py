"""What the gateway sees of the engines behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from toque.types import EngineRequest, EngineStats, SequenceOutput


class ReplicaState(StrEnum):
    STARTING = "starting"  # process up, weights loading
    READY = "ready"
    DEGRADED = "degraded"  # alive, but no step finished for too long while work exists
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"


class RouteKind(StrEnum):
    ROUTED = "routed"  # sent to a replica for the first time
    RETRIED = "retried"  # sent to another one; nothing of the answer had arrived
    MIGRATED = "migrated"  # sent to another one with the tokens that had arrived
    HEDGED = "hedged"  # sent to a second one besides the first
    WON = "won"  # of the two, this one spoke first: its answer goes on
    HELD = "held"  # waits: for a replica that starts, or for a swap in place


@dataclass(frozen=True, slots=True)
class RouteEvent:
    """What became of a request on its way to the engines. ``at``: seconds since the epoch; ``tokens``: how many
    tokens of the answer had arrived; ``reason``: for people, why it was not the first choice's."""

    kind: RouteKind
    at: float
    replica_id: str = ""
    epoch: int = 0
    version: str = ""
    tokens: int = 0
    reason: str = ""


OnRoute = Callable[[RouteEvent], None]


class EngineClient(Protocol):
    """One replica, or a pool of them, as something that answers requests.

    ``generate`` yields at least one output; the last one carries ``finish_reason``. It raises UnavailableError when
    nothing was started, ContextLengthError or RequestError when the engine refuses the request, and ReplicaDiedError
    when the replica went away after the first output. Closing the iterator early (``aclose``) aborts the request:
    its KV blocks are free within a second.
    """

    @property
    def state(self) -> ReplicaState: ...

    @property
    def reason(self) -> str:
        """Why it is not ready, for people; "" when it is."""
        ...

    def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        """``on_route`` hears, in this event loop, where the request goes; a single replica has nothing to say."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """One row of the table that routing gets from the fleet: a replica process and where it listens.

    ``replica_id`` and ``epoch`` name one process: a restarted replica has the same id and a higher epoch. ``state``
    and ``reason`` are what the fleet knows of the process; what the replica says of itself counts while it talks.
    """

    replica_id: str
    epoch: int
    address: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    version: str = ""  # a key of RoutingTable.versions


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A model version as a gateway needs to know it. ``key`` is its digest, or its path and state where it has none,
    and tells apart what runs with other engine options; it stays inside. Clients see the digest, or else the label.
    """

    key: str
    path: Path  # of the model on this machine: where tokenizer and template are read
    digest: str = ""
    label: str = ""  # as people say it: "smollm2/3", or a file's name and what tells its states apart; ASCII
    engine: Mapping[str, object] = field(default_factory=dict)  # EngineOptions that differ from the defaults
    state: str = ""  # the `file_state` of a plain path: other files are another version


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All that routing gets from the fleet about one deployment: a snapshot, replaced as a whole.

    ``shares`` says where new requests go, as weights of versions that sum to 1; a stream stays on its version.
    ``held``: arrivals wait (a swap in place). ``asleep``: there is no replica, and an arrival starts one.
    ``leaving``: versions that take nothing new; a request that has lost its replica there gets another one.
    """

    deployment: str
    entries: tuple[ReplicaEntry, ...] = ()
    versions: Mapping[str, ServedVersion] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    held: bool = False
    asleep: bool = False
    policy: str = "least_load"
    reason: str = ""  # why it is asleep or has no entries, for people
    tool_parser: str = ""  # the dialect of the model's tool calls; "": read off its chat template
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionOutcomes:
    """What clients saw of one version, counted since this gateway started: the material of a canary's judgement.

    ``errors`` counts requests that failed through no fault of the client. ``ttft`` and ``tpot`` are the sums in
    seconds over the ``answered`` ones, and their histograms over `LATENCY_BOUNDS` (one more bucket for the rest).
    """

    requests: int = 0
    errors: int = 0
    answered: int = 0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    ttft_counts: tuple[int, ...] = ()
    tpot_counts: tuple[int, ...] = ()


# Upper bounds in seconds, 10 to the decade: 1 ms to 100 s.
LATENCY_BOUNDS = tuple(10 ** (exponent / 10 - 3) for exponent in range(51))


@dataclass(frozen=True, slots=True)
class DeploymentSignals:
    """What one gateway tells the fleet about one deployment, about twice a second and when something waits."""

    deployment: str
    waiting: int = 0  # requests here that no replica has yet
    waiting_s: float = 0.0  # the longest of them, so far
    running: int = 0  # requests that a replica has
    idle_s: float = 0.0  # since a request was last here; 0 while one is
    outcomes: Mapping[str, VersionOutcomes] = field(default_factory=dict)
    ttft_p95_s: float = 0.0  # over the last minute; 0 where there was none
    stranded: Mapping[str, int] = field(default_factory=dict)  # of those that wait, had a replica: by version
