"""One request's measurements: metrics, percentiles, its ledger row and its trail, all from the same events.

That they agree to the token is so by construction: `Meter` is the only one who counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING

from toque.errors import ToqueError
from toque.monitor.attempts import Attempts, Route
from toque.monitor.cost import PriceList, device_cost
from toque.monitor.latency import Latencies
from toque.monitor.ledger.record import Outcome, UsageRecord
from toque.monitor.metrics import Metrics, RequestRecord
from toque.monitor.trail import Trail, TrailKind
from toque.types import StepEvent

if TYPE_CHECKING:
    from toque.monitor.ledger.ledger import Entry

CLIENT_LEFT = 499
_BILLED = frozenset({Outcome.OK.value, Outcome.CANCELLED.value})


class Meter(RequestRecord):
    """Counts one admitted request, and closes its row exactly once: by `completed`, or by `ended` however else.

    A prompt counts once its computing has begun, so a request that ends in the queue has no tokens. The row is closed
    before the last bytes of an answer leave: whoever has the whole answer finds it in the ledger. ``trail`` gets the
    moments of the request's life, ``on_close`` the closed row with it. Choices are numbered as in the answer.
    """

    def __init__(
        self,
        metrics: Metrics,
        latencies: Latencies,
        model: str,
        arrived: float,
        entry: Entry | None,
        trail: Trail | None = None,
        on_close: Callable[[Trail, UsageRecord], None] | None = None,
    ) -> None:
        super().__init__(metrics, model, arrived)
        self._latencies = latencies
        self._model = model
        self._entry = entry
        self._row = UsageRecord("", 0) if entry is None else entry.record
        self._began = arrived
        self._reasons: list[str] = []
        self._gaps = latencies.rolling(model, "inter_token")
        self._attempts = Attempts()
        self._trail = trail
        self._on_close = on_close
        self._sent: dict[
            int, int
        ] = {}  # when each choice went to its replica, microseconds since the beginning
        self._sent_to: dict[tuple[int, str, int], int] = {}
        self._over = False
        if trail is not None:
            trail.note(self._since(), TrailKind.ADMITTED)

    def queued(self, seconds: float) -> None:
        super().queued(seconds)
        self._latencies.add(self._model, "queue", seconds)
        self._row.queue_us = max(self._row.queue_us, int(seconds * 1e6))

    def served_by(self, version: str) -> None:
        """The version that answers: another than was expected, where that one went away meanwhile."""
        self._row.version = version

    def prepared(self, tokens: int) -> None:
        """The request's text is ``tokens`` tokens now, all prompts together."""
        if self._trail is not None:
            self._trail.note(self._since(), TrailKind.PREPARED, tokens=tokens)

    def routed(self, choice: int, route: Route) -> None:
        """Where one of the request's sequences went."""
        at_us = self._since()
        sent = self._sent_to.setdefault((choice, route.replica_id, route.epoch), at_us)
        if route.kind == "won":
            self._sent[choice] = sent
        elif route.kind != "hedged":
            self._sent[choice] = self._sent_to[choice, route.replica_id, route.epoch] = at_us
        self._attempts.routed(choice, route, self._row.opened_at + at_us)
        if self._trail is not None:
            where = f"{route.replica_id}.{route.epoch}" if route.replica_id else ""
            note = f"{where}: {route.reason}" if where and route.reason else where or route.reason
            self._trail.note(at_us, TrailKind(route.kind), choice, route.tokens, note=note)

    def stepped(self, choice: int, events: list[StepEvent]) -> None:
        """What became of one of the request's sequences in its engine."""
        if self._trail is not None:
            self._trail.stepped(self._sent.get(choice, 0), choice, events)

    def prompt(self, tokens: int, cached_tokens: int, choice: int = 0) -> None:
        super().prompt(tokens, cached_tokens)
        self._row.prompt_tokens += tokens
        self._row.cached_tokens += cached_tokens
        if (attempt := self._attempts.of(choice)) is not None:
            attempt.prompt_tokens += tokens
            attempt.cached_tokens += cached_tokens

    def tokens(self, count: int, gap: float, now: float, choice: int = 0) -> None:
        if self._row.ttft_us == 0:
            self._row.ttft_us = max(1, int((now - self._began) * 1e6))
            self._latencies.add(self._model, "ttft", now - self._began)
        super().tokens(count, gap, now)
        self._row.completion_tokens += count
        if (attempt := self._attempts.of(choice)) is not None:
            attempt.completion_tokens += count
        if gap == 0.0 and self._trail is not None:
            self._trail.note(self._since(now), TrailKind.FIRST_TOKEN, choice, count)
        if gap > 0.0:
            self._gaps.add(gap / count, now, count)

    def reasoned(self, tokens: int) -> None:
        """So many of a choice's tokens were its reasoning."""
        self._row.reasoning_tokens += tokens

    def computed(self, device_us: int, choice: int = 0) -> None:
        """Device time that a step attributed to one of the request's sequences."""
        self._row.device_ns += 1_000 * device_us
        if (attempt := self._attempts.of(choice)) is not None:
            attempt.device_ns += 1_000 * device_us

    def finished(self, reason: str, choice: int = 0, tokens: int = 0) -> None:
        """One choice is over, after so many tokens. Several different reasons are told in the order they came, as
        "stop,length"."""
        if self._trail is not None:
            self._trail.note(self._since(), TrailKind.FINISHED, choice, tokens, note=reason)
        finished = self._series.finished
        finished[reason] = finished.get(reason, 0) + 1
        if reason not in self._reasons:
            self._reasons.append(reason)

    def completed(self, now: float) -> None:
        super().completed(now)
        self._series.prompt_sizes.add(self._row.prompt_tokens)
        self._series.answer_sizes.add(self._row.completion_tokens)
        self._latencies.add(self._model, "e2e", now - self._began)
        self._close(Outcome.OK, 200, "")

    def ended(self, error: BaseException | None, *, client_left: bool = False) -> None:
        """The request is over, by ``error`` or by the client's leaving; nothing when it had been completed."""
        if client_left:
            self._close(Outcome.CANCELLED, CLIENT_LEFT, "client_closed_request")
        elif isinstance(error, ToqueError):
            refused = 400 <= error.status < 500 and not self._row.completion_tokens
            self._close(
                Outcome.REFUSED if refused else Outcome.FAILED,
                error.status,
                error.error_code or type(error).type,
            )
        elif error is not None:
            self._close(Outcome.FAILED, 500, "internal_error")
        else:
            self._close(Outcome.FAILED, 500, "unfinished")

    def _close(self, outcome: Outcome, status: int, error_code: str) -> None:
        if self._over:
            return
        self._over = True
        row = self._row
        self._attempts.finish(row, outcome, error_code)
        reasons = ",".join(self._reasons)
        if outcome is not Outcome.OK:
            reasons = "abort" if outcome is Outcome.CANCELLED else "error"
        if self._entry is not None:
            self._entry.close(outcome, status, finish_reason=reasons, error_code=error_code)
        else:  # nobody keeps the row, but the trail's end tells of it
            row.outcome, row.status = outcome.value, status
            row.finish_reason, row.error_code = reasons, error_code
        if self._trail is not None:
            why = error_code or reasons
            self._trail.note(
                self._since(),
                TrailKind.CLOSED,
                tokens=row.completion_tokens,
                note=f"{outcome.value} {status}" + (f" ({why})" if why else ""),
            )
            if self._on_close is not None:
                self._on_close(self._trail, row)

    def _since(self, now: float = 0.0) -> int:
        """Microseconds since the request's arrival."""
        return int(((now or time.perf_counter()) - self._began) * 1e6)


def pricing(prices: PriceList, hourly: Decimal) -> Callable[[UsageRecord], None]:
    """Fills in what a row is sold for and what it cost. What failed is not sold; what the client left is, so far as
    it was computed."""

    def price(record: UsageRecord) -> None:
        record.cost_nano = device_cost(record.device_ns, hourly)
        for attempt in record.attempts:
            attempt.cost_nano = device_cost(attempt.device_ns, hourly)
        if record.outcome in _BILLED:
            listed = prices.price(record.tenant, record.model)
            record.list_nano = listed.amount(
                record.prompt_tokens, record.cached_tokens, record.completion_tokens
            )

    return price
