"""What all handlers share: the deployments, the settings, the keys, the measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from toque.gateway.auth import KeyRing
from toque.gateway.deployment import Deployment
from toque.gateway.prepare import TextPool
from toque.gateway.quota import Allowance
from toque.monitor.engine_metrics import ReplicaCollector
from toque.monitor.latency import Latencies
from toque.monitor.metrics import Metrics
from toque.routing.pool import ReplicaPool
from toque.types import EngineStats

if TYPE_CHECKING:
    from toque.config import Settings
    from toque.fleet.admin import FleetAdmin
    from toque.gateway.answer_store import AnswerStore
    from toque.monitor.event_log import EventLog
    from toque.monitor.ledger.ledger import Ledger
    from toque.monitor.span_sender import SpanSender
    from toque.registry.reader import RegistryReader


class Gateway:
    """One gateway process. ``draining`` is set once, by the server, when it has been told to stop."""

    def __init__(self, deployments: dict[str, Deployment], settings: Settings) -> None:
        """``deployments`` may come and go while it runs."""
        self.deployments = deployments
        self.settings = settings
        self.keys = KeyRing(
            settings.auth.api_keys,
            Path(settings.auth.keys_file) if settings.auth.keys_file else None,
            Allowance(
                settings.limits.requests_per_minute,
                settings.limits.tokens_per_minute,
                settings.limits.concurrent_requests,
            ),
        )
        self.metrics = Metrics(self.engine_stats)
        self.metrics.registry.register(ReplicaCollector(self.replica_stats))
        if settings.server.metrics_compat == "vllm":
            self.metrics.speak_vllm()
        self.latencies = Latencies()
        self.ledger: Ledger | None = None  # set, started and closed by whoever serves
        self.event_log: EventLog | None = None  # as the ledger
        self.spans: SpanSender | None = None
        self.fleet: FleetAdmin | None = None  # set by whoever serves, where there is one to administer
        self.registry: RegistryReader | None = None  # as the fleet; closed here
        self.answers: AnswerStore | None = None  # as the ledger; closed here
        self.answering: dict[tuple[str, str], bytes] = {}  # requests with an Idempotency-Key, while they run
        self.pool = TextPool()
        self.started = time.time()
        self.draining = False

    @property
    def ready(self) -> bool:
        """Every deployment that is expected answers and makes progress, or wakes for whoever asks.

        Expected are those that were there at the start, and later ones once they have been ready; not those that
        are switched off. Without any it is not ready: all of nothing is nothing.
        """
        expected = [deployment for deployment in self.deployments.values() if deployment.expected]
        return not self.draining and bool(expected) and all(deployment.ready for deployment in expected)

    def close(self) -> None:
        self.pool.close()
        if self.answers is not None:
            self.answers.close()
        if self.registry is not None:
            self.registry.close()
        if self.event_log is not None:
            self.event_log.stop()
        if self.spans is not None:
            self.spans.stop()

    def engine_stats(self) -> dict[str, EngineStats]:
        """Each deployment's engines, added up."""
        return {name: deployment.client.stats() for name, deployment in self.deployments.items()}

    def replica_stats(self) -> dict[str, dict[str, EngineStats]]:
        """Each replica's, by deployment."""
        clients = {name: deployment.client for name, deployment in self.deployments.items()}
        return {
            name: client.replica_stats()
            for name, client in clients.items()
            if isinstance(client, ReplicaPool)
        }
