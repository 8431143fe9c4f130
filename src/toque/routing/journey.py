"""One request on its way: where it has been, what of its answer has arrived, and how it goes on elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from toque.errors import EngineError, ReplicaDiedError, ToqueError
from toque.routing.base import OnRoute, RouteEvent, RouteKind
from toque.routing.policies.base import Key
from toque.types import EngineRequest, FinishReason, SequenceOutput

MAX_MOVES = 16  # of one request, however far it comes in between


@dataclass(frozen=True, slots=True)
class MoveBounds:
    """How often a request goes elsewhere: ``deaths`` of replicas under it without a new token in between (a request
    that kills replicas stops there), as many ``silences`` (of which a busy machine has some, too), and ``moves`` in
    all."""

    deaths: int = 2
    silences: int = 4
    moves: int = MAX_MOVES


class Journey:
    """Keeps what another replica needs to go on: the prompt, and the tokens that have arrived.

    The answer's outputs pass through `arrived`, which makes those of a later replica what they would have been in an
    undisturbed run: prompt logprobs, cached tokens and the time in the queue come once, with the first.
    """

    __slots__ = (
        "_bounds",
        "_kind",
        "_on_route",
        "_original",
        "_reason",
        "_resumed",
        "deaths",
        "moves",
        "silences",
        "started",
        "tokens",
        "tried",
        "version",
    )

    def __init__(
        self, request: EngineRequest, version: str | None, on_route: OnRoute | None, bounds: MoveBounds
    ) -> None:
        """``version``: the only one whose replicas may answer; None: any."""
        self.version = version
        self.tokens: list[int] = []
        self.started = False  # something of the answer has arrived
        self.tried: set[Key] = set()  # replicas that refused it, since it last made progress
        self.deaths = 0  # since it last made progress
        self.silences = 0
        self.moves = 0
        self._bounds = bounds
        self._original = request
        self._on_route = on_route
        self._kind = RouteKind.ROUTED
        self._reason = ""
        self._resumed = False

    @property
    def request(self) -> EngineRequest:
        """What the next replica is asked."""
        original = self._original
        if not self.tokens:
            return original
        sampling = original.sampling
        if sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)
        generated = (*original.generated, *self.tokens)
        return replace(original, sampling=sampling, generated=generated)

    @property
    def deadline(self) -> float | None:
        return self._original.deadline

    def sent(self, key: Key, version: str) -> None:
        self._tell(self._kind, key, version)

    def held(self, why: str) -> None:
        self._tell(RouteKind.HELD, ("", 0), self.version or "", why)

    def arrived(self, output: SequenceOutput) -> SequenceOutput:
        if self._resumed:
            output.cached_tokens = 0
            output.queue_seconds = 0.0
            output.prompt_logprobs = None
        if output.tokens:
            self.tokens += output.tokens
            if self.moves:
                self.deaths = self.silences = 0
                self.tried.clear()
        self.started = True
        return output

    def hedged(self, key: Key, version: str, seconds: float) -> None:
        self._tell(RouteKind.HEDGED, key, version, f"no token after {seconds:g} s")

    def won(self, key: Key, version: str) -> None:
        self._tell(RouteKind.WON, key, version)

    def failed(self, key: Key, error: ToqueError, *, died: bool, silent: bool = False) -> bool:
        """The replica refused it, died, went silent, or gave it up. Whether it may be sent to another."""
        self.tried.add(key)
        self.deaths += died
        self.silences += silent
        self.moves += 1
        self._resumed = self.started
        self._kind = RouteKind.MIGRATED if self.started else RouteKind.RETRIED
        self._reason = error.message
        return (
            self.deaths < self._bounds.deaths
            and self.silences < self._bounds.silences
            and self.moves <= self._bounds.moves
        )

    def ending(self, error: ToqueError) -> ToqueError:
        """What the client is told when it cannot go on."""
        if not self.started or isinstance(error, ReplicaDiedError):
            return error
        return ReplicaDiedError(f"the answer could not be continued on another replica: {error.message}")

    def _tell(self, kind: RouteKind, key: Key, version: str, reason: str = "") -> None:
        if self._on_route is not None:
            event = RouteEvent(
                kind,
                time.time(),
                *key,
                version=version,
                tokens=len(self.tokens),
                reason=reason or self._reason,
            )
            self._on_route(event)


def engine_gave_up(output: SequenceOutput) -> bool:
    """An error that is the engine's own, so that another one may do better."""
    return output.finish_reason is FinishReason.ERROR and output.error_code in (None, EngineError.code)
